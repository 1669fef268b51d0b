from bw1 import *
import sys
vs={'det tma':V(True,RED=False),'det red':V(True,RED=True),'det red lse1':V(True,RED=True,LSE=1),'det red lse2':V(True,RED=True,LSE=2),'det tma lse2':V(True,RED=False,LSE=2),
 'any tma':V(False,RED=False),'any red':V(False,RED=True),'any red lse1':V(False,RED=True,LSE=1),'any red lse2':V(False,RED=True,LSE=2),'any red lse2 s3':V(False,RED=True,LSE=2,STAGES=3),
 'det red lse2 nopre':V(True,RED=True,LSE=2,NO_PREFETCH=True),'any tma lse2':V(False,RED=False,LSE=2),
 'det tma nowait':V(True,True,RED=False),'det red lse2 nowait':V(True,True,RED=True,LSE=2)}
names=list(vs)
if len(sys.argv)>1:
    a,fl,m=make(768,2,384,1); vs[names[int(sys.argv[1])]](a); torch.cuda.synchronize(); sys.exit()
print(f'start {time.time()-t00:.0f}s', flush=True)
a,fl,m=make(4608,6)
ref=vs['any tma'](a)
for n,v in vs.items():
    t=time.time(); r=v(a); torch.cuda.synchronize(); t=time.time()-t; r2=v(a)
    print(f'{n:20s} {t:5.1f}s', [f'{(x.float()-y.float()).abs().max().item():.2e}/{y.float().abs().max().item():.2e}' for x,y in zip(r,ref)], 'same bits' if all(torch.equal(x,y) for x,y in zip(r,r2)) else 'other bits', 'timeouts', HB.spin_timeouts('cuda'), flush=True)
few=['det tma','det red','det red lse2','any tma','any red','any red lse2']
rows=[('46080,48',(46080,48)),('11520,12',(11520,12)),('30720,24,128',(30720,24,128)),('23040,18 h24',(23040,18,384,24)),('11520,12 h2',(11520,12,384,2)),('46080,120',(46080,120))]
for name,s in rows:
    a,fl,m=make(*s)
    full=name in('46080,48','30720,24,128','11520,12')
    rounds=7 if fl<4e12 else 5 if fl<3e13 else 2
    show(name, timed({n:(lambda v=vs[n]:v(a)) for n in (vs if full else few)},rounds,sleep=4_000_000 if fl<1e13 else 1_000_000), fl, 'det tma')
    if name=='46080,48':
        for n in ('det tma','any red lse2'):
            for _ in range(12): vs[n](a)
            print('   clocks', n, smi(), flush=True); torch.cuda.synchronize()
    if name!='46080,120': kernels(name+' det red lse2', lambda: vs['det red lse2'](a))
