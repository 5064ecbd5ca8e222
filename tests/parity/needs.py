"""The libraries that a script compares with, on the CPU and offline; imported before them."""
import contextlib
import os
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_OFFLINE"] = "1"


@contextlib.contextmanager
def needs(libraries):
    """Around the imports: if one fails, the script ends with status 77, skipped."""
    try:
        yield
    except ImportError as missing:
        print(f"skipped: {missing}; set TESSERA_PEER_PYTHON to a Python with {libraries}")
        sys.exit(77)
