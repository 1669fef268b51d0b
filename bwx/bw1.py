import sys, os, time, subprocess, threading
t00=time.time()
import torch
from ssta.kernels import BlockLists, block_sparse_attention
from ssta.kernels.hopper import backward as B, forward as F
import ssta.kernels.hopper.backward as HB
orig_constants, orig_schedule = HB.constants, HB.schedule
def sched_nowait(*a, **k):
    s=orig_schedule(*a,**k)
    if s.lock_values is not None: s.lock_values.zero_()
    return s
class V:
    def __init__(self, det, nowait=False, **kw): self.det,self.nowait,self.kw=det,nowait,kw
    def __call__(self, a):
        HB.constants=lambda d,t: dict(orig_constants(d,t),**self.kw)
        HB.schedule=sched_nowait if self.nowait else orig_schedule
        return HB.hopper_backward(*a, self.det)
def make(S,kept,block=384,heads=16,dim=128,seed=0,kv_heads=None):
    torch.manual_seed(seed)
    N=S//block
    q,k,v,do=(torch.randn(1,heads,S,dim,device='cuda',dtype=torch.bfloat16) for _ in range(4))
    m=torch.zeros(1,heads,N,N,dtype=torch.bool,device='cuda')
    m.scatter_(3, torch.rand(1,heads,N,N,device='cuda').topk(kept,dim=-1).indices, True)
    bl=BlockLists.from_mask(m, block, block)
    out,lse=block_sparse_attention(q,k,v,bl,return_lse=True,impl='hopper')
    a=(do,None,q,k,v,out,lse,bl,bl.transpose(),dim**-.5,False)
    return a, 10*S*kept*block*heads*dim, m
def timed(calls, rounds=7, warm=1, sleep=4_000_000):
    t={n:[] for n in calls}
    for r in range(warm+rounds):
        for n,f in calls.items():
            a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
            if sleep: torch.cuda._sleep(sleep)
            a.record(); f(); b.record(); b.synchronize()
            if r>=warm: t[n].append(a.elapsed_time(b))
    return {n:sorted(x)[len(x)//2] for n,x in t.items()}
def smi():
    r=subprocess.run('nvidia-smi -i %s --query-gpu=clocks.sm,power.draw,temperature.gpu --format=csv,noheader'%os.environ.get('CUDA_VISIBLE_DEVICES','0'),shell=True,capture_output=True,text=True).stdout.strip()
    return r
def show(name, med, fl, base):
    print(f'## {name}  [{time.time()-t00:.0f}s]', flush=True)
    for n,m in med.items(): print(f'   {n:34s} {m:8.3f} ms {fl/m/1e9:6.0f} TFLOP/s  {med[base]/m:.3f}', flush=True)
def kernels(name, f, n=3, top=9):
    from torch.profiler import profile, ProfilerActivity
    f(); torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(n): f()
        torch.cuda.synchronize()
    print(f'-- {name}')
    for e in sorted(p.key_averages(), key=lambda e:-e.device_time_total)[:top]: print(f'     {e.device_time_total/n/1e3:8.4f} ms x{e.count/n:3.1f} {e.key[:70]}', flush=True)
