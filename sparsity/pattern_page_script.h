#pragma once

/// The markup and the script of the page of patterns. Included by pattern_page.cpp.

namespace tessera::sparsity {

inline constexpr const char* kPageHead = R"html(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Sparsity patterns</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">
<style>
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5b6570;--line:#d7dce1;--paper:#fff;--panel:#f6f8fa;--kept:#16425b;--band:#b9c6d2}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#98a2ad;--line:#343b43;--paper:#14181c;--panel:#1d2329;--kept:#9cc9e3;--band:#44525f}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:76rem;margin:1.5rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .3rem}p{color:var(--soft);margin:.2rem 0}
#controls{position:sticky;top:0;background:var(--paper);border-bottom:1px solid var(--line);padding:.6rem 0;display:flex;flex-wrap:wrap;gap:.8rem;z-index:1}
label{font-size:.85em;color:var(--soft)}select,input,button{font:inherit;font-size:.9em}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.88em;margin:.4rem 0}
th,td{padding:.15rem .7rem .15rem 0;border-bottom:1px solid var(--line);text-align:left}th button{all:unset;cursor:pointer;font-weight:600}
figure{margin:.5rem 0;background:var(--panel);border-radius:6px;padding:.7rem;overflow:auto}figcaption{color:var(--soft);font-size:.88em}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(26rem,1fr));gap:.8rem}canvas{max-width:100%;image-rendering:pixelated}
details{font-size:.85em;color:var(--soft)}pre{white-space:pre-wrap;margin:.2rem 0}.chance{color:var(--soft)}.beyond{font-weight:600}
svg text{fill:var(--soft);font-size:11px}svg{width:100%;max-width:46rem;height:auto}
</style></head><body>
<h1>Sparsity patterns</h1><p id="summary"></p>
<div id="controls"></div><main id="main"></main>
)html";

inline constexpr const char* kPageScript = R"js(
'use strict';
const raw=JSON.parse(document.getElementById('data').textContent),T={};
for(const [name,table] of Object.entries(raw))if(table.rows)T[name]=table.rows.map(r=>Object.fromEntries(table.columns.map((c,i)=>[c,r[i]])));
const $=(tag,attributes={},...children)=>{const e=document.createElement(tag);for(const[k,v]of Object.entries(attributes))k.startsWith('on')?e.addEventListener(k.slice(2),v):e.setAttribute(k,v);e.append(...children);return e};
const S=(tag,attributes={},...children)=>{const e=document.createElementNS('http://www.w3.org/2000/svg',tag);for(const[k,v]of Object.entries(attributes))e.setAttribute(k,v);e.append(...children);return e};
const unique=a=>[...new Set(a)],show=(v,d=4)=>v===null||v===undefined?'–':Number.isInteger(v)?String(v):Number(v).toPrecision(d);
const colours=['#2171b5','#d94801','#238b45','#6a51a3','#b30000','#525252','#1b9e9e','#b8860b','#c2185b','#5d4037','#00695c','#7cb342','#3949ab','#ef6c00','#8e24aa','#546e7a'];
const css=n=>getComputedStyle(document.documentElement).getPropertyValue(n).trim();
const state={},main=document.getElementById('main'),controls=document.getElementById('controls');
function select(name,title,values,label=v=>v){const s=$('select',{id:name,onchange:()=>{state[name]=s.value;if(name==='input'||name==='layer'||name==='projection')state.reference=null;draw()}},...values.map(v=>$('option',{value:v},String(label(v)))));state[name]=String(values[0]);controls.append($('label',{},title+' ',s));return s}
const layers=unique(T.matrices.map(m=>m.layer)),projections=unique(T.matrices.map(m=>m.projection));
select('input','method',unique(T.matrices.map(m=>m.input)));select('layer','layer',layers,v=>v<0?'–':v);select('projection','projection',projections);
const ks=unique(T.clusters.map(c=>c.k));select('k','k',ks.length?ks:[0]);select('source','clusters of',unique(T.clusters.map(c=>c.source)));
select('model','chance',['sums_kept','rows_shuffled','independent'],v=>({independent:'independent, equal density',rows_shuffled:'features shuffled',sums_kept:'both sums kept'}[v]));
select('statistic','heat map of',unique(T.statistics.map(s=>s.statistic)));
select('order','bits sorted by',['gradient','cluster','position']);select('zoom','pixels per bit',[2,1,4,8]);
const threshold=$('input',{id:'threshold',type:'number',value:'0',step:'any',min:'0',style:'width:6em',onchange:()=>{state.threshold=Number(threshold.value)||0;draw()}});state.threshold=0;controls.append($('label',{},'keep features with norm above ',threshold));
const matrix=()=>T.matrices.find(m=>m.input===state.input&&String(m.layer)===state.layer&&m.projection===state.projection);
const of=(table,m)=>m?T[table].filter(r=>r.matrix_id===m.id):[];
function block(id,title,text,figure,...content){const s=$('section',{id},$('h2',{},title),$('p',{},text),$('figure',{},...content));for(const f of[].concat(figure))s.append($('details',{},$('summary',{},'SQL: '+f),$('pre',{},raw.sql[f])));main.append(s);return s}
function axes(w,h,x0,x1,y0,y1,xl,yl){const svg=S('svg',{viewBox:`0 0 ${w} ${h}`,role:'img'}),l=52,b=h-34,X=x=>l+(x-x0)/((x1-x0)||1)*(w-l-12),Y=y=>b-(y-y0)/((y1-y0)||1)*(b-12);
svg.append(S('path',{d:`M${l} 12V${b}H${w-12}`,fill:'none',stroke:css('--line')}));
for(let i=0;i<=4;++i){const x=x0+(x1-x0)*i/4,y=y0+(y1-y0)*i/4;svg.append(S('text',{x:X(x),y:b+14,'text-anchor':'middle'},show(x,3)),S('text',{x:l-5,y:Y(y)+4,'text-anchor':'end'},show(y,3)))}
svg.append(S('text',{x:(l+w)/2,y:h-4,'text-anchor':'middle'},xl),S('text',{x:4,y:10},yl));return{svg,X,Y,b}}
const line=(a,points,colour)=>a.svg.append(S('path',{d:points.map((p,i)=>(i?'L':'M')+a.X(p[0]).toFixed(1)+' '+a.Y(p[1]).toFixed(1)).join(''),fill:'none',stroke:colour,'stroke-width':1.8}));
const empty=t=>$('p',{},t);
function table(id,rows,columns,limit=200){const sort=state['sort_'+id]||{column:columns[0][0],down:false},t=$('table',{id});
const sorted=[...rows].sort((a,b)=>{const x=a[sort.column],y=b[sort.column];const c=x===y?0:x===null?1:y===null?-1:x<y?-1:1;return sort.down?-c:c});
t.append($('tr',{},...columns.map(([c,title])=>$('th',{},$('button',{onclick:()=>{state['sort_'+id]={column:c,down:sort.column===c&&!sort.down};draw()}},title+(sort.column===c?(sort.down?' ▾':' ▴'):''))))));
for(const r of sorted.slice(0,limit))t.append($('tr',{class:r.class||''},...columns.map(([c])=>$('td',{},typeof r[c]==='string'?r[c]:show(r[c])))));
return sorted.length>limit?[t,$('p',{},`the first ${limit} of ${sorted.length}`)]:[t]}
)js"
                                           R"js(
const verdict=n=>n.within_chance==null?'not known':n.within_chance?'within chance':'beyond chance';
function verdicts(m){const rows=T.nulls.filter(n=>n.subject==='matrix'&&n.subject_id===m.id&&n.model===state.model).map(n=>({...n,band:show(n.low)+' to '+show(n.high),verdict:verdict(n),class:n.within_chance?'chance':'beyond'}));
block('chance','Every figure next to chance','Drawn masks keep what the null model says; p is corrected (Holm) over all matrices. Within chance: corrected p above 0.05.','nulls',...table('figures',rows,[['statistic','figure'],['observed','observed'],['mean','chance'],['band','95 % of draws'],['effect','effect'],['p_corrected','p'],['verdict','verdict']]))}
function pairs(m){const rows=T.pairs.filter(p=>p.matrix===m.matrix).map(p=>{const n=T.nulls.find(n=>n.subject==='pair'&&n.subject_id===p.id&&n.model===state.model)||{};const name=id=>T.matrices.find(x=>x.id===id).input;return{...p,pair:name(p.a_id)+' / '+name(p.b_id),interval:show(p.low)+' to '+show(p.high),chance:n.mean,band:show(n.low)+' to '+show(n.high),verdict:verdict(n)}});
if(!rows.length)return;const a=axes(560,260,0,1,0,1,'metric','share of features below');const lines=rows.filter(r=>r.metric==='jaccard');
lines.forEach((r,i)=>{line(a,T.pair_quantiles.filter(q=>q.pair_id===r.id).map(q=>[q.value,q.share]),colours[i%16]);a.svg.append(S('text',{x:60,y:24+14*i,style:`fill:${colours[i%16]}`},'Jaccard '+r.pair))});
block('pairs','Masks of this matrix compared','Per feature; mean with its 95 % bootstrap interval, next to the mean over drawn masks.',['pairs','pair_quantiles'],...table('pair_rows',rows,[['pair','pair'],['metric','metric'],['mean','mean'],['sd','sd'],['interval','95 % interval'],['chance','chance'],['band','95 % of draws'],['verdict','verdict']]),a.svg)}
function density(m){const map=of('maps',m)[0],box=$('div',{});if(!map)return;const c=$('canvas',{id:'density',width:map.width*6,height:map.height*6,onclick:e=>{const r=c.getBoundingClientRect();const share=m.axis==='row'?(e.clientX-r.left)/r.width:(e.clientY-r.top)/r.height;state.offset=Math.floor(share*m.length);draw();document.getElementById('bits').scrollIntoView()}}),x=c.getContext('2d');
const values=[];for(let i=0;i<map.density.length;i+=2)values.push(parseInt(map.density.substr(i,2),16)/255);let low=Math.min(...values),high=Math.max(...values);if(high===low)low=high-1;
values.forEach((v,i)=>{const t=(v-low)/(high-low);x.fillStyle=`hsl(210 60% ${92-72*t}%)`;x.fillRect(i%map.width*6,Math.floor(i/map.width)*6,6,6)});
box.append(c,$('figcaption',{},`kept shares from ${show(low,3)} to ${show(high,3)}; rows are outputs, columns inputs. Click to see the bits there.`));block('map','Density map','',['maps'],box)}
function decode(m){const b=of('bits',m)[0];if(!b)return null;const rows=[];for(let f=0;f<b.features;++f){const w=new Uint32Array(b.words_per_feature);for(let i=0;i<w.length;++i)w[i]=parseInt(b.bits.substr((f*w.length+i)*8,8),16);rows.push(w)}return{...b,rows}}
const ones=v=>{v-=v>>>1&0x55555555;v=(v&0x33333333)+(v>>>2&0x33333333);return(v+(v>>>4)&0x0f0f0f0f)*0x01010101>>>24};
const distance=(a,b)=>{let s=0;for(let i=0;i<a.length;++i)s+=ones((a[i]^b[i])>>>0);return s};
const labels=m=>of('labels',m).filter(l=>String(l.k)===state.k&&l.source===state.source).sort((a,b)=>a.gradient_rank-b.gradient_rank).map(l=>l.cluster);
function bits(m){const b=decode(m);if(!b){block('bits','Bits','',['bits'],empty('The bits of this matrix are not in the page; analyze fewer matrices with --only.'));return}
const z=Number(state.zoom),kept=of('features',m).filter(f=>f.gradient_rank!==null).sort((a,c)=>a.gradient_rank-c.gradient_rank);let order=b.rows.map((_,i)=>i).filter(i=>!kept[i]||kept[i].norm===null||kept[i].norm>=state.threshold);const l=labels(m);
const reference=state.reference??0,gap=order.length?b.rows.map(r=>distance(r,b.rows[Math.min(reference,b.features-1)])):[];
if(state.order==='gradient')order.sort((i,j)=>gap[i]-gap[j]||i-j);if(state.order==='cluster')order.sort((i,j)=>l[i]-l[j]||i-j);if(state.order==='position')order.sort((i,j)=>kept[i].feature-kept[j].feature);
const width=Math.min(b.length,Math.floor(1120/z)),first=Math.max(0,Math.min(state.offset||0,b.length-width));
const c=$('canvas',{id:'spy',width:width*z,height:Math.max(1,order.length*z),onclick:e=>{const r=c.getBoundingClientRect();state.reference=order[Math.min(order.length-1,Math.floor((e.clientY-r.top)/r.height*order.length))];state.order='gradient';document.getElementById('order').value='gradient';draw()}}),x=c.getContext('2d');x.fillStyle=css('--paper');x.fillRect(0,0,c.width,c.height);
order.forEach((f,y)=>{x.fillStyle=state.order==='cluster'?colours[l[f]%16]:css('--kept');for(let p=0;p<width;++p){const at=first+p;if(b.rows[f][at>>>5]>>>(at&31)&1)x.fillRect(p*z,y*z,z,z)}});
const slide=$('input',{id:'offset',type:'range',min:0,max:b.length-width,value:first,style:'width:100%',oninput:()=>{state.offset=Number(slide.value);draw()}});
block('bits','Bits of the clustered features','A row per feature, a pixel block per position; filled: kept. Click a feature to sort the others by their Hamming distance to it.',['bits','labels'],c,slide,$('figcaption',{id:'bits_caption'},`${order.length} features, positions ${first} to ${first+width-1} of ${b.length}; distances to feature ${kept[reference]?kept[reference].feature:reference}: ${show(Math.min(...gap.filter(g=>g>0)))} to ${show(Math.max(...gap))}`))}
function tsne(m){const f=of('features',m).filter(f=>f.tsne_x!==null&&(f.norm===null||f.norm>=state.threshold));if(!f.length)return;const l=labels(m),xs=f.map(p=>p.tsne_x),ys=f.map(p=>p.tsne_y),a=axes(560,360,Math.min(...xs),Math.max(...xs),Math.min(...ys),Math.max(...ys),'t-SNE 1','t-SNE 2');
for(const p of f)a.svg.append(S('circle',{cx:a.X(p.tsne_x),cy:a.Y(p.tsne_y),r:3.5,fill:colours[(l[p.gradient_rank]??0)%16]},S('title',{},'feature '+p.feature)));block('tsne','t-SNE of the clustered features','Hamming distances; colours are clusters.',['features','labels'],a.svg)}
function histogram(m){const d=of('distances',m);if(!d.length)return;const all=d.reduce((s,r)=>s+r.pairs,0),first=d[0].distance,last=d[d.length-1].distance,bins=Math.min(60,last-first+1),width=(last-first+1)/bins,h=new Array(bins).fill(0);for(const r of d)h[Math.min(bins-1,Math.floor((r.distance-first)/width))]+=r.pairs;
const a=axes(560,260,first/m.length,(last+1)/m.length,0,Math.max(...h)/all,'Hamming distance / length','share of pairs');h.forEach((v,i)=>{const x=a.X((first+i*width)/m.length),w=a.X((first+(i+1)*width)/m.length)-x;a.svg.append(S('rect',{x,y:a.Y(v/all),width:Math.max(.5,w-1),height:Math.max(0,a.b-a.Y(v/all)),fill:css('--kept')}))});
let sum=0;const c=axes(560,260,first/m.length,(last+1)/m.length,0,1,'Hamming distance / length','share of pairs below');line(c,d.map(r=>[r.distance/m.length,(sum+=r.pairs)/all]),colours[0]);
block('histogram','Hamming distances of all pairs of the pool','Histogram and cumulative distribution.',['distances'],$('div',{class:'two'},a.svg,c.svg))}
function ratios(m){const rows=T.nulls.filter(n=>n.subject==='matrix'&&n.model===state.model&&/^ratio_/.test(n.statistic)&&n.statistic.endsWith('_k'+state.k+'_'+state.source)&&n.subject_id===m.id);if(!rows.length)return;const top=Math.max(...rows.flatMap(r=>[r.observed||0,r.high||0]))*1.1,svg=S('svg',{viewBox:`0 0 720 ${rows.length*42+30}`}),X=v=>260+v/top*440;
rows.forEach((r,i)=>{const y=20+42*i;svg.append(S('text',{x:250,y:y+8,'text-anchor':'end'},r.statistic.replace('_k'+state.k+'_'+state.source,'').replaceAll('_',' ')));if(r.low!==null)svg.append(S('rect',{x:X(r.low),y:y-6,width:Math.max(2,X(r.high)-X(r.low)),height:20,fill:css('--band')}));if(r.observed!==null)svg.append(S('circle',{cx:X(r.observed),cy:y+4,r:6,fill:r.within_chance?css('--soft'):colours[1]},S('title',{},show(r.observed))),S('text',{x:X(r.observed)+10,y:y+8},show(r.observed)))});
const done=of('clusters',m).filter(c=>String(c.k)===state.k&&c.source===state.source),s=of('stability',m).find(c=>String(c.k)===state.k&&c.source===state.source);
block('ratios','Separation ratio and its chance band',`Between / within; the band holds 95 % of the draws. ${done.length} executions: mean ${show(s&&s.mean_ratio_pairs)}, coefficient of variation ${show(s&&s.coefficient_of_variation,3)} %, ${show(s&&s.mean_singletons,3)} singletons; on independent masks mean ${show(s&&s.mean_chance_ratio_pairs)}.`,['nulls','stability'],svg);
const sizes=(done[0]?.sizes||'').split(',').filter(Boolean).map(Number),a=axes(560,200,0,Math.max(1,sizes.length),0,Math.max(1,...sizes),'cluster','features');sizes.forEach((v,i)=>a.svg.append(S('rect',{x:a.X(i)+2,y:a.Y(v),width:Math.max(1,a.X(1)-a.X(0)-4),height:a.b-a.Y(v),fill:colours[i%16]},S('title',{},String(v)))));block('sizes','Cluster sizes','Execution 0; clusters of one feature are singletons.',['clusters'],a.svg)}
function heat(){const inputs=unique(T.matrices.map(m=>m.input)),cells=[];for(const i of inputs)for(const l of layers){const m=T.matrices.find(m=>m.input===i&&m.layer===l&&m.projection===state.projection);const s=m&&T.statistics.find(s=>s.matrix_id===m.id&&s.statistic===state.statistic);cells.push({i,l,v:s?s.value:null})}
const known=cells.map(c=>c.v).filter(v=>v!==null),low=Math.min(...known),high=Math.max(...known),t=$('table',{id:'heat'});t.append($('tr',{},$('th',{},'method'),...layers.map(l=>$('th',{},'layer '+(l<0?'–':l)))));
for(const i of inputs)t.append($('tr',{},$('td',{},i),...layers.map(l=>{const c=cells.find(c=>c.i===i&&c.l===l),f=c.v===null?0:high>low?(c.v-low)/(high-low):.5;return $('td',{style:c.v===null?'':`background:hsl(210 60% ${f>.55?30:90-40*f}%);color:${f>.55?'#fff':'#111'}`},show(c.v))})));
block('heatmap','Methods and layers',`${state.statistic} of ${state.projection}.`,['statistics','matrices'],t)}
function norms(m){const levels=T.nulls.filter(n=>n.subject==='matrix'&&n.subject_id===m.id&&n.statistic.startsWith('input_norm_')).map(n=>({...n,band:show(n.low)+' to '+show(n.high),verdict:verdict(n),class:n.within_chance?'chance':'beyond'})),rows=of('input_norms',m).filter(r=>r.norm>0);
const title='Input norms and the density of columns';if(!levels.length){block('norms',title,'The input has no input_norms.safetensors: tessera prune writes it if its method reads samples.',['input_norms'],empty('No input norms.'));return}
const t=table('norm_rows',levels,[['statistic','correlation'],['observed','observed'],['model','chance: masks'],['mean','chance'],['band','95 % of draws'],['effect','effect'],['p_corrected','p'],['verdict','verdict']]);if(!rows.length){block('norms',title,'',['input_norms','nulls'],empty('The columns of this matrix are not in the page.'),...t);return}
const xs=rows.map(r=>Math.log10(r.norm)),ys=rows.map(r=>r.density),a=axes(560,300,Math.min(...xs),Math.max(...xs),Math.min(...ys),Math.max(...ys),'log10 of the norm of the input','kept share of the column');
rows.forEach((r,i)=>a.svg.append(S('circle',{cx:a.X(xs[i]),cy:a.Y(r.density),r:2.5,fill:colours[0]},S('title',{},`column ${r.column_index}: norm ${show(r.norm)}, density ${show(r.density)}`))));
block('norms',title,`A point per column, at most 512 of ${m.columns}; inputs that are always 0 are left out. Correlations are of all columns; where p is above 0.05, masks without structure have them as well.`,['input_norms','nulls'],...t,a.svg)}
function worth(m){block('worth','What the pattern could buy','Bytes of the weights in each format, values of 2 bytes, and blocks of features x 1 position that are pruned as a whole. A bound is what memory traffic allows at best; nothing here is measured.',['bytes','skipped'],...table('byte_rows',of('bytes',m),[['format','format'],['bytes','bytes'],['of_dense','of dense'],['bound','bound']]),...table('skip_rows',of('skipped',m),[['feature_order','order'],['group_size','features per block'],['share','blocks skipped'],['bound','bound']]))}
function features(m){const rows=of('features',m).filter(f=>f.norm===null||f.norm>=state.threshold);block('features','Features of the pool','Click a column to sort by it.',['features'],...table('feature_rows',rows,[['feature','feature'],['kept','kept'],['density','density'],['norm','norm'],['nearest','nearest'],['nearest_distance','distance'],['cluster_masks','cluster (masks)'],['cluster_values','cluster (values)']],100))}
function draw(){const top=scrollY;main.replaceChildren();const m=matrix();document.getElementById('summary').textContent=`${T.matrices.length} matrices of ${unique(T.matrices.map(m=>m.input)).length} inputs`+(raw.last_figures<T.matrices.length?`; figures of the first ${raw.last_figures}`:'')+(raw.last_heavy<T.matrices.length?`; features and bits of the first ${raw.last_heavy}`:'');
if(T.perplexity.length)block('perplexity','Perplexity','As tessera prune noted it.',['perplexity'],...table('perplexities',T.perplexity,[['input','method'],['text','text'],['value','perplexity']]));
if(!m){main.append(empty('This method has no such matrix.'));heat();return}
block('matrix','Matrix '+m.matrix,'',['matrices'],...table('matrix_rows',[m],[['rows','rows'],['columns','columns'],['sparsity','sparsity'],['axis','features are'],['features','features'],['zero_features','all zero'],['one_features','all kept'],['duplicate_features','duplicates'],['unique_features','unique']]));
if(m.id>raw.last_figures){main.append(empty('The figures of this matrix are not in the page; analyze fewer matrices with --only.'));heat();return}
verdicts(m);pairs(m);density(m);bits(m);tsne(m);histogram(m);ratios(m);heat();norms(m);worth(m);features(m);scrollTo(0,top)}
draw();
)js";

}  // namespace tessera::sparsity
