"""Plain text of HTML, man pages, reST, Markdown, POD, dictionaries and the other formats that `tools/corpus` finds in packages.

`documents(path, data)` is the whole interface: it yields (name, paragraphs). A paragraph has no blank line; markup, navigation, the
frame of each page and signature lists that generators make are left out. What is left to `tools/corpus`: paragraphs that repeat.
"""
import gzip
import html
import re
import struct
import subprocess
import unicodedata
import zlib


class Unreadable(Exception):
    """A file that claims a format and breaks it."""


# ---------------------------------------------------------------------------------------------------------------- characters

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff\ufffd\ue000-\uf8ff\ufff0-\ufffc]")
SPACES = re.compile("[\t\xa0\u2000-\u200a\u202f\u205f\u3000]")
LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
# UTF-8 that was read as Windows-1252 or Latin-1 and written again: a lead byte as a letter, then continuation bytes as signs.
MOJIBAKE = re.compile("[\xc2-\xf4][\x80-\xbf\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6\u02dc\u2013-\u203a\u20ac\u2122]+")


def decoded(data, declared=None):
    """UTF-8 where it is, else the declared encoding, else Windows-1252, in which no byte is an error here."""
    for encoding in ("utf-8-sig", declared):
        try:
            if encoding:
                return data.decode(encoding)
        except (UnicodeDecodeError, LookupError):
            pass
    return data.decode("cp1252", "replace")


def repaired(found):
    for encoding in ("cp1252", "latin-1"):
        try:
            return found[0].encode(encoding).decode("utf-8")
        except (UnicodeEncodeError, UnicodeDecodeError):
            pass
    return found[0]


def cleaned(text):
    """One form per character: NFC, \\n, plain spaces; no controls, soft hyphens or private characters; mojibake decoded."""
    text = LINE_ENDS.sub("\n", text)
    if not text.isascii():
        text = unicodedata.normalize("NFC", MOJIBAKE.sub(repaired, text))
    return CONTROLS.sub("", SPACES.sub(" ", text.expandtabs(8)))


RULE = re.compile(r"[-=_*~#+|.^\u2500-\u257f ]{4,}")  # a line across the page or between the rows of a table


def paragraphs(text):
    """The paragraphs of a text in which blank lines separate them, without common indentation."""
    found = []
    for block in re.split(r"\n\s*\n", cleaned(text)):
        lines = [line.rstrip() for line in block.split("\n")]
        lines = [line for line in lines if line and not RULE.fullmatch(line)]
        if lines:
            indent = min(len(line) - len(line.lstrip()) for line in lines)
            found.append("\n".join(line[indent:] for line in lines))
    return found


def filled(text):
    return " ".join(text.split())


# ---------------------------------------------------------------------------------------------------------------------- HTML

TAG = re.compile(r"""<!--.*?-->|<(/?)([a-zA-Z][\w:-]*+)((?:[^>"']++|"[^"]*+"|'[^']*+')*+)>|<[!?][^>]*+>""", re.S)
ATTRIBUTE = re.compile(r"""([\w:-]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")
CHARSET = re.compile(rb"""charset=["']?([\w-]+)""")
BLOCKS = frozenset("""address article aside blockquote body caption center dd details dir div dl dt fieldset figcaption figure form h1 h2 h3
    h4 h5 h6 header hr li main ol p pre section summary table tbody td th thead tr ul""".split())
RAW = frozenset(("script", "style", "title", "textarea"))
KEPT_SPACE = "\ue000"  # a space in <pre>, while others are trimmed
LEFT_OUT = frozenset("nav footer button select form svg noscript template head math object".split())
# Elements that can be left out by class, id or role: those whose end tag is not optional.
CLOSED = frozenset("a aside code details div footer form h1 h2 h3 h4 h5 h6 header main nav ol pre section span table ul".split())
LEFT_OUT_BY_NAME = frozenset("""
    headerlink viewcode-link related sphinxsidebar sphinxsidebarwrapper toctree-wrapper toc contents footer wy-nav-side linenos
    linenodiv indextable genindex-jumpbox rst-footer-buttons wy-breadcrumbs docnav banner
    skip-nav sub-nav top-nav summary inheritance legal-copy method-summary see-list help-page
    sidebar mobile-topbar sidebar-menu-toggle srclink out-of-band search-container nav-wrapper nav-wide-wrapper menu-bar menu-title
    buttons anchor rightside tooltip notable-traits since rustdoc-breadcrumbs
    trait-implementations-list synthetic-implementations-list blanket-implementations-list implementors-list
    synthetic-implementors-list foreign-impls-list deref-methods-list trait-implementations synthetic-implementations
    blanket-implementations implementors synthetic-implementors toggle-label item-right-docblock footer-text versioninfo
    """.split())
LEFT_OUT_BY_ROLE = frozenset("navigation search contentinfo banner complementary".split())


class Page:
    """A pass over the tags of a page; `text()` is what is between them."""

    def __init__(self, source):
        self.source, self.out, self.pre = source, [], 0

    def text(self):
        start = re.search(r"<main\b|<[a-z]+ [^>]*role=[\"']main[\"']|<body\b", self.source)
        position, source = start.start() if start else 0, self.source
        end = source.find("</main>", position)
        end = len(source) if end < 0 else end
        while match := TAG.search(source, position, end):
            self.put(source[position:match.start()])
            position = match.end()
            name = (match[2] or "").lower()
            if not name:
                continue
            if name in RAW and not match[1]:
                position = self.after_raw(name, position, end)
            elif not match[1] and self.is_left_out(name, match[3]):
                position = self.after_element(name, position, end)
            else:
                self.tag(name, bool(match[1]))
        self.put(source[position:end])
        return "".join(self.out)

    def put(self, text):
        if text:
            text = html.unescape(text)
            self.out.append(text.replace(" ", KEPT_SPACE) if self.pre else re.sub(r"\s+", " ", text))

    def tag(self, name, closing):
        if name == "pre":
            self.pre = max(0, self.pre + (-1 if closing else 1))
        if name == "br":
            self.out.append("\n")
        elif name in ("td", "th"):
            self.out.append("  ")
        elif name in ("tr", "dd"):
            self.out.append("" if closing else "\n")
        elif name == "dt":
            self.out.append("" if closing else "\n\n")
        elif name == "li":
            self.out.append("" if closing else "\n- ")
        elif name in BLOCKS:
            self.out.append("\n\n")

    @staticmethod
    def is_left_out(name, attributes):
        if name in LEFT_OUT:
            return True
        if name not in CLOSED or attributes.endswith("/"):
            return False
        for key, *values in ATTRIBUTE.findall(attributes):
            value = "".join(values)
            if key == "class" and not LEFT_OUT_BY_NAME.isdisjoint(value.split()):
                return True
            if key == "id" and value in LEFT_OUT_BY_NAME or key == "role" and value in LEFT_OUT_BY_ROLE:
                return True
        return False

    def after_raw(self, name, position, end):
        close = re.compile(f"</{name}\\b[^>]*>", re.I).search(self.source, position, end)
        return close.end() if close else end

    def after_element(self, name, position, end):
        """After the element that has just begun: elements of its name nest."""
        depth = 1
        while depth and (match := TAG.search(self.source, position, end)):
            position = match.end()
            if (match[2] or "").lower() == name and not match[3].endswith("/"):
                depth += -1 if match[1] else 1
        return end if depth else position


def read_html(data):
    declared = CHARSET.search(data[:2048])
    text = Page(decoded(data, declared[1].decode() if declared else None)).text()
    text = re.sub(r"(?m)^ +| +$", "", text)
    text = re.sub(r"(?m)^-(?=\n|\Z)", "", text)                        # a list item that begins with a paragraph
    text = re.sub(r"(?m)^([A-Z][\w ]{0,24}:)\n(?=\S)", r"\1 ", text)  # "Returns:" and what it returns
    yield "", paragraphs(text.replace(KEPT_SPACE, " "))


# ----------------------------------------------------------------------------------------------------------------- man pages

ROFF_CHARACTERS = {"em": "\u2014", "en": "\u2013", "hy": "-", "bu": "\u2022", "co": "\u00a9", "rg": "\u00ae", "tm": "\u2122", "lq": "\u201c",
                   "rq": "\u201d", "oq": "\u2018", "cq": "\u2019", "aq": "'", "dq": '"', "ga": "`", "ha": "^", "ti": "~", "rs": "\\",
                   "mu": "\u00d7", "+-": "\u00b1", "<=": "\u2264", ">=": "\u2265", "!=": "\u2260", "->": "\u2192", "<-": "\u2190", "or": "|",
                   "de": "\u00b0", "Fo": "\u00ab", "Fc": "\u00bb", "ss": "\u00df", "12": "\u00bd", "14": "\u00bc"}
ROFF_ACCENTS = {"'": "\u0301", "`": "\u0300", ":": "\u0308", "^": "\u0302", "~": "\u0303", ",": "\u0327"}
ROFF_STRINGS = {"C`": "", "C'": "", 'L"': '"', 'R"': '"', "--": "--", "Aq": "'", "PI": "pi", "Tm": "\u2122", "lq": "\u201c", "rq": "\u201d", "R": "\u00ae"}
ROFF_ESCAPE = re.compile(r"""\\(?:".*|f(?:\(..|\[[^\]]*\]|.)|s[-+]?(?:\(..|\[[^\]]*\]|\d+)|\*(?:\[([^\]]*)\]|\((..)|(.))|\(([^\n]{2})|\[([^\]]*)\]
    |[hvwoDlLSXZ]'[^']*'|[mMFnYgk](?:\(..|\[[^\]]*\]|.)|(.))""", re.X)
ROFF_SINGLE = {"-": "-", "e": "\\", "\\": "\\", " ": " ", "~": " ", "0": " ", "t": "\t", ".": ".", "'": "'", "`": "`"}
FONTS = frozenset("B I R BR RB BI IB IR RI SM SB".split())
MDOC_SKIPPED = frozenset("Dd Dt Os Bl El Bk Ek Rs Re".split())
MDOC_PARAGRAPHS = frozenset("Pp It Bd Ed D1 Dl Lp".split())


def roff_escapes(text):
    def character(found):
        string = found[1] or found[2] or found[3]
        if string is not None:
            return ROFF_ACCENTS.get(string) or ROFF_STRINGS.get(string, "")
        name = found[4] or found[5]
        if name is not None:
            if name in ROFF_CHARACTERS:
                return ROFF_CHARACTERS[name]
            if len(name) == 2 and name[0] in ROFF_ACCENTS and name[1].isalpha():
                return name[1] + ROFF_ACCENTS[name[0]]
            if re.fullmatch("u[0-9A-F]{4,6}", name):
                return chr(int(name[1:], 16) % 0x110000)
            return ""
        return ROFF_SINGLE.get(found[6] or "", "")
    return ROFF_ESCAPE.sub(character, text) if "\\" in text else text


def roff_arguments(text):
    return [roff_escapes((quoted or bare).replace('""', '"')) for quoted, bare in re.findall(r'"((?:[^"]|"")*)"?|([^\s"]\S*)', text)]


class ManPage:
    """man and mdoc macros. Definitions, conditions and tables (tbl) are skipped: their text is layout."""

    def __init__(self, source):
        self.lines, self.out, self.fill = iter(source.split("\n")), [], []
        self.preformatted = False

    def flush(self, separator="\n\n"):
        if self.fill:
            self.out.append(("\n" if self.preformatted else " ").join(self.fill))
            self.fill = []
        if self.out and self.out[-1] != separator:
            self.out.append(separator)

    def skip_until(self, pattern):
        for line in self.lines:
            if re.match(pattern, line):
                return

    def skip_condition(self, line):
        depth = line.count("\\{") - line.count("\\}")
        while depth > 0 and (line := next(self.lines, None)) is not None:
            depth += line.count("\\{") - line.count("\\}")

    def text(self):
        for line in self.lines:
            if line[:1] in (".", "'"):
                self.request(line[1:].strip())
            elif line.strip() == "" and not self.preformatted:
                self.flush()
            else:
                line = roff_escapes(line).rstrip() if self.preformatted else filled(roff_escapes(line))
                if line or self.preformatted:
                    self.fill.append(line)
        self.flush()
        return "".join(self.out)

    def request(self, line):
        name, _, rest = line.partition(" ")
        name = re.match(r"[^\\\s]*", name)[0]
        if name in ("if", "ie", "el", "while"):
            self.skip_condition(line)
        elif name in ("de", "ig", "am", "de1"):
            self.skip_until(r"[.']\.")
        elif name in ("TS", "EQ", "PS"):
            self.skip_until(rf"[.']{name[0]}E")
        elif name in ("SH", "SS", "Sh", "Ss", "PP", "P", "LP", "HP", "TP", "TQ", "sp", "Sp", "RS", "RE") or name in MDOC_PARAGRAPHS:
            self.flush()
            if name in ("SH", "SS", "Sh", "Ss", "It", "D1", "Dl") and rest:
                words = [word for word in roff_arguments(rest) if not (name == "It" and word in MDOC_NAMES)]
                self.fill.append(" ".join(words))
                self.flush("\n" if name == "It" else "\n\n")
        elif name in ("IP", "It"):
            self.flush()
            if (arguments := roff_arguments(rest)) and re.search(r"\w", arguments[0]):
                self.fill.append(arguments[0])
                self.flush("\n")
        elif name in ("Vb", "nf", "EX"):
            self.flush()
            self.preformatted = True
        elif name in ("Ve", "fi", "EE"):
            self.flush()
            self.preformatted = False
        elif name == "br":
            self.flush("\n")
        elif name in FONTS:
            joint = "" if len(name) == 2 and name != "SM" and name != "SB" else " "
            self.fill.append(filled(joint.join(roff_arguments(rest))))
        elif name in MDOC_NAMES and name not in MDOC_SKIPPED:
            self.mdoc(name, rest)

    def mdoc(self, name, rest):
        words, dash = [], name == "Fl"
        for word in roff_arguments(rest):
            if word in MDOC_NAMES:
                dash = word == "Fl"
            elif len(word) == 1 and word in ".,:;)]?!" and words:
                words[-1] += word
            else:
                words.append("-" + word if dash else word)
                dash = False
        if name == "Nd":
            words.insert(0, "-")
        if words:
            self.fill.append(" ".join(words))


MDOC_NAMES = frozenset("""Ac Ad An Ao Ap Ar Aq At Bc Bo Bq Bsx Bx Cd Cm Dc Do Dq Dv Ec Em Eo Er Ev Fa Fc Fl Fn Fo Ft Fx Ic In Lb Li Lk Ms
    Mt Nd Nm No Ns Nx Oc Oo Op Ox Pa Pc Pf Po Pq Qc Ql Qo Qq Sc Sm So Sq Sy Tn Ud Ux Va Vt Xc Xo Xr""".split())


def read_man(data):
    text = decoded(data)
    if re.match(r"\.so\s", text):  # another name of a page
        return
    yield "", paragraphs(ManPage(text).text())


# --------------------------------------------------------------------------------------------- reST, Markdown, POD, plain text

def read_rest(data):
    """reST without directives, options, comments, labels, roles and underlines; the text in directives stays."""
    lines, comment = [], None
    for line in cleaned(decoded(data)).split("\n"):
        indent = len(line) - len(line.lstrip())
        if comment is not None and (not line.strip() or indent > comment):
            continue
        comment = None
        stripped = line.strip()
        if re.match(r"\.\. [\w-]+(:[\w-]+)*::", stripped) or re.fullmatch(r":[\w -]+:( .*)?", stripped):
            lines.append("")
        elif stripped == ".." or stripped.startswith((".. _", ".. |", ".. [", ".. ")):
            comment = None if stripped.startswith(".. [") else indent
        elif stripped and re.fullmatch(r"([^\w\s])\1{2,}|[-=+| ]{3,}", stripped):
            lines.append("" if stripped[0] in "+|" or " " in stripped else None)
        else:
            lines.append(line)
    text = "\n".join("" if line is None else line for line in lines)
    text = re.sub(r":[\w:+-]+:`([^`<]*?)\s*(?:<[^`>]*>)?`", r"\1", text)
    text = re.sub(r"``([^`]*)``|`([^`<]*?)\s*(?:<[^`>]*>)?`_{0,2}", lambda found: found[1] or found[2] or "", text)
    text = re.sub(r"(?<!\w)\*\*?(\S[^*\n]*?)\*\*?(?!\w)", r"\1", text)
    yield "", paragraphs(re.sub(r"::$", ":", text, flags=re.M))


def read_markdown(data):
    text = cleaned(decoded(data))
    text = re.sub(r"(?m)^\s*(```|~~~).*$|^\s*[-=*_]{3,}\s*$|^\[[^\]]+\]:.*$", "", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"(?m)^ {0,3}#{1,6} *(.*?)#*$", r"\n\1\n", text)
    text = re.sub(r"(?m)^ {0,3}> ?", "", text)
    text = re.sub(r"(\*\*|__|`)(\S.*?)\1", r"\2", text)
    text = re.sub(r"</?[a-zA-Z][^<>]*>", "", text)
    yield "", paragraphs(re.sub(r"\\([\\`*_{}\[\]()#+.!-])", r"\1", html.unescape(text)))


def read_pod(data):
    text = re.sub(r"(?ms)^=(begin|for) .*?(?:^=end.*?$|\n\n)|^=encoding.*?$", "", cleaned(decoded(data)))
    text = re.sub(r"(?m)^=(?:head\d|item|over|back|cut|pod)[ \t]*", "", text)
    for _ in range(4):  # codes nest
        text = re.sub(r"X<[^<>]*>", "", text)
        text = re.sub(r"L<(?:([^<>|]*)\|)?([^<>]*)>", lambda found: found[1] or found[2], text)
        text = re.sub(r"E<(\w+)>", lambda found: html.unescape(f"&{found[1]};"), text)
        text = re.sub(r"[BCFISZ]<<+ (.*?) >+>|[BCFISZ]<([^<>]*)>", lambda found: found[1] or found[2] or "", text)
    yield "", paragraphs(text)


def read_plain(data):
    yield "", paragraphs(decoded(data))


def read_fortunes(data):
    yield "", ["\n".join(paragraphs(entry)) for entry in re.split(r"(?m)^%\s*$", decoded(data)) if entry.strip()]


# --------------------------------------------------------------------------------------------------------------- dictionaries

SOURCES = re.compile(r"\s*\[[^\[\]]*(?:Webster|WordNet|PJC|Century Dict|Stormonth|RHUD|MW10|Lanham|Foldoc)[^\[\]]*\]")
PRONUNCIATION = re.compile(r"\s*\((?=[^()]*(?:\[[^\]]{1,4}\]|[a-z]\"[a-z]|[a-z]`[a-z]|\*))[^()]{1,200}\)")


def entry_text(lines):
    text = " ".join(lines[0].split()) + "\n" + "\n".join(lines[1:])
    text = re.sub(r"\s*\\[^\\]*\\(\w?)", lambda found: found[1] and " " + found[1], text)  # the headword again, in syllables
    text = PRONUNCIATION.sub("", SOURCES.sub("", text))
    text = re.sub(r"\{([^{}]*)\}", r"\1", re.sub(r"\[\?\]| \?(?=[ ,;.\]])", "", text))  # ?: letters that dictd lacks
    return "\n".join(line for block in re.split(r"\n\s*\n", text) if (line := filled(block)))


def read_dictionary(data):
    """dictd's format: an entry begins at the margin after a blank line. One document per initial letter, in the file's order."""
    groups, entry, blank = {}, [], True

    def finish():
        if entry:
            initial = unicodedata.normalize("NFD", entry[0].lstrip("'-\"{"))[:1].lower()
            text = entry_text(entry)
            if text and not entry[0].startswith("00-database"):
                groups.setdefault(initial if "a" <= initial <= "z" else "other", []).append(text)

    for line in cleaned(decoded(data)).split("\n"):
        if blank and line[:1].strip():
            finish()
            entry = []
        entry.append(line)
        blank = not line.strip()
    finish()
    for initial in sorted(groups):
        yield initial, groups[initial]


def read_wordnet(data):
    """`data.*` of WordNet: a line per set of synonyms; one document per lexicographer file, the second field."""
    groups = {}
    for line in cleaned(decoded(data)).split("\n"):
        fields = line.partition("|")[0].split()
        if line.startswith("  ") or len(fields) < 5:
            continue
        try:
            words = fields[4:4 + 2 * int(fields[3], 16):2]
        except ValueError as error:
            raise Unreadable(f"not a line of WordNet's data files: {line[:60]!r}") from error
        words = ", ".join(re.sub(r"\((a|p|ip)\)$", "", word).replace("_", " ") for word in words)
        groups.setdefault(fields[1], []).append(f"{words}: {filled(line.partition('|')[2])}")
    for number in sorted(groups):
        yield number, groups[number]


# --------------------------------------------------------------------------------------------------------- the King James text

BIBLE = b"EC02Compressed Data File"


def read_bible(data):
    """bible.data: windows of compress(1) without their headers, after a table of offsets; a verse per line. A document per book."""
    if not data.startswith(BIBLE) or len(data) < 0x5c:
        raise Unreadable("not the compressed text of bible-kjv")
    count, = struct.unpack_from(">I", data, 0x58)
    if len(data) < 0x5c + 4 * count:
        raise Unreadable("the table of windows is cut off")
    starts = struct.unpack_from(f">{count}I", data, 0x5c) + (len(data),)
    text = b""
    for first, last in zip(starts, starts[1:]):
        window = subprocess.run(["gzip", "-dc"], input=b"\x1f\x9d\x90" + data[first:last], capture_output=True, check=False)
        if window.returncode not in (0, 2):  # 2: a warning
            raise Unreadable(f"a window cannot be decompressed: {window.stderr.decode().strip()}")
        text += window.stdout
    books = {}
    for book, chapter, verse in re.findall(r"(?m)^(\d?[A-Za-z]+)(\d+):\d+ (.*)$", decoded(text)):
        books.setdefault(book, {}).setdefault(int(chapter), []).append(verse.strip())
    for book, chapters in books.items():
        yield book, [cleaned("\n".join(verses)) for _, verses in sorted(chapters.items())]


# --------------------------------------------------------------------------------------------------------------------- choice

KINDS = (  # in the order of preference where one document comes in several
    ("html", r"\.x?html?$", read_html), ("man", r"(?:^|/)usr/share/man/man\w+/[^/]+\.\d\w*$", read_man),
    ("rest", r"\.rst(?:\.txt)?$", read_rest), ("markdown", r"\.(?:md|markdown)$", read_markdown), ("pod", r"\.pod$", read_pod),
    ("dictionary", r"\.dict$", read_dictionary), ("wordnet", r"(?:^|/)wordnet/data\.\w+$", read_wordnet),
    ("fortunes", r"(?:^|/)games/fortunes/[^/.]+$", read_fortunes), ("bible", r"(?:^|/)bible\.data$", read_bible),
    ("plain", r"\.txt$|(?:^|/)README(?:\.[A-Za-z]+)?$|(?:^|/)usr/share/state/[^/.]+$", read_plain))


def kind_of(path):
    """The index in KINDS and the path without what compression appends, or None."""
    path = re.sub(r"\.(?:gz|dz)$", "", path)
    return next(((index, path) for index, (_, pattern, _) in enumerate(KINDS) if re.search(pattern, path)), None)


def documents(path, data):
    """Yields (name within the file or "", paragraphs) of a file that has a kind. Throws Unreadable."""
    index, _ = kind_of(path)
    if data[:2] == b"\x1f\x8b":  # dict.dz is gzip with a table of contents
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise Unreadable(f"cannot be decompressed: {error}") from error
    yield from KINDS[index][2](data)
