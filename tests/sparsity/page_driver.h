#pragma once

/// A script for the end of the page of patterns: operates every control, checks what it changes, and leaves
/// the outcome as the title.

namespace tessera::sparsity {

inline constexpr const char* kPageDriver = R"js(<script>
window.problems=[];window.onerror=(m,s,l,c)=>{problems.push(m+' '+l+':'+c)};
try{let n=0;const check=(v,t)=>{++n;if(!v)problems.push(t)};
for(const id of ['input','layer','projection','k','source','model','statistic','order','zoom']){const s=document.getElementById(id);for(const o of s.options){s.value=o.value;s.dispatchEvent(new Event('change'));check(state[id]===o.value,'control '+id);if(id==='statistic')check(document.getElementById('heatmap').textContent.includes(o.value),'heat map '+o.value);check(!matrix()||document.querySelectorAll('section').length>=9,'sections after '+id)}s.value=s.options[0].value;s.dispatchEvent(new Event('change'))}
const before=document.getElementById('bits_caption').textContent;document.getElementById('spy').dispatchEvent(new MouseEvent('click',{clientX:5,clientY:document.getElementById('spy').getBoundingClientRect().top+40}));check(document.getElementById('bits_caption').textContent!==before,'click of a feature');
const rows=()=>document.getElementById('feature_rows').rows.length;const all=rows();const t=document.getElementById('threshold');t.value='1e9';t.dispatchEvent(new Event('change'));check(T.features[0].norm===null||rows()===1,'threshold keeps what is above it');t.value='0';t.dispatchEvent(new Event('change'));check(rows()===all,'threshold back');
document.querySelectorAll('#feature_rows th button')[1].click();const kept=[...document.getElementById('feature_rows').rows].slice(1).map(r=>Number(r.cells[1].textContent));check(kept.every((v,i)=>!i||kept[i-1]<=v),'sorting');
document.getElementById('density').dispatchEvent(new MouseEvent('click',{clientX:100,clientY:100}));const o=document.getElementById('offset');o.value=o.max;o.dispatchEvent(new Event('input'));
const c=document.getElementById('spy').getContext('2d').getImageData(0,0,document.getElementById('spy').width,document.getElementById('spy').height).data;check(c.some(v=>v!==c[0]),'bits are drawn');
document.title='checks '+n+' problems '+problems.length+'. '+problems.join(' | ')}catch(e){document.title='threw '+e.stack}
</script></body>)js";

}  // namespace tessera::sparsity
