from bw1 import *
import sys
sys.path.insert(0,'bwx/old')
import oldk.kernels.hopper.backward as OB
import ssta.kernels.lowering.dq_schedule as DS
class W(V):
    def __init__(self, det, nowait=False, stagger=5, together=0, window=1<<20, nw=4, **kw): V.__init__(self,det,nowait,**kw); self.s=(stagger,together,window,nw)
    def __call__(self,a):
        DS.STAGGER, DS.TOGETHER, DS.WINDOW, DS.ASSIGN_WARPS = self.s
        return V.__call__(self,a)
vs={'old det':lambda a:OB.hopper_backward(*a,True),'old any':lambda a:OB.hopper_backward(*a,False),
 'any s2':W(False,STAGES=2),'any s3':W(False,STAGES=3),'det s2':W(True,STAGES=2),'det s3':W(True,STAGES=3)}
names=list(vs)
if len(sys.argv)>1:
    a,fl,m=make(768,2,384,1); vs[names[int(sys.argv[1])]](a); torch.cuda.synchronize(); sys.exit()
print(f'start {time.time()-t00:.0f}s', flush=True)
a,fl,m=make(4608,6,heads=8)
ref=vs['old any'](a)
for n,v in vs.items():
    t=time.time(); r=v(a); torch.cuda.synchronize(); t=time.time()-t; r2=v(a)
    print(f'{n:20s} {t:5.1f}s', [f'{(x.float()-y.float()).abs().max().item():.2e}/{y.float().abs().max().item():.2e}' for x,y in zip(r,ref)], 'same bits' if all(torch.equal(x,y) for x,y in zip(r,r2)) else 'other bits', 'timeouts', HB.spin_timeouts('cuda'), flush=True)
sys.path.insert(0,'benchmark')
try:
    from peers import PEERS, Inputs, Tensors
except Exception as e: print(e); PEERS=()
def peers(a,m,block,kept):
    t=Tensors(a[2],a[3],a[4],a[0]); out={}
    for p in PEERS:
        if p.name in('flash-attn-4','cuDNN frontend') and not p.absent():
            try:
                f=p.prepare(Inputs(t,m,kept,block)).start_backward(); f(); torch.cuda.synchronize(); out[p.name]=f
            except Exception as e: print(p.name, str(e)[:200])
    return out
rows=[('46080,48',(46080,48)),('30720,24,128',(30720,24,128)),('11520,12',(11520,12)),('46080,24',(46080,24)),('23040,18 h24',(23040,18,384,24)),('11520,12 h2',(11520,12,384,2)),('46080,120',(46080,120))]
for name,s in rows:
    a,fl,m=make(*s)
    calls=dict(vs)
    calls={n:(lambda v=v:v(a)) for n,v in vs.items()}
    if name!='46080,120': calls|=peers(a,m,s[2] if len(s)>2 else 384,s[1])
    show(name, timed(calls,7 if fl<4e12 else 5 if fl<3e13 else 2,sleep=4_000_000 if fl<1e13 else 1_000_000), fl, 'old any')
