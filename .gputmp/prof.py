import torch,time,sys
from coupler_engine_fsdp.logprobs import token_logprobs
from torch.profiler import profile, ProfilerActivity
R,H,V=4096,2048,151936
h=torch.randn(R,H,device="cuda",dtype=torch.bfloat16,requires_grad=True)
w=(torch.randn(V,H,device="cuda")*3*H**-.5).bfloat16().requires_grad_()
t=torch.randint(0,V,(R,),device="cuda"); temp=torch.rand(R,device="cuda")+.5; g=torch.randn(R,device="cuda")
def run(chunk):
    lp,_=token_logprobs(h,w,None,t,temp,False,chunk); return torch.autograd.grad((lp*g).sum(),[h,w])
for chunk in (2**22,):
    run(chunk); torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU,ProfilerActivity.CUDA]) as p:
        run(chunk); torch.cuda.synchronize()
    print(p.key_averages().table(sort_by="cuda_time_total",row_limit=22,max_name_column_width=60))
def bench(f,n=20):
    f();torch.cuda.synchronize();s=time.time()
    for _ in range(n): f()
    torch.cuda.synchronize(); return (time.time()-s)/n*1e6
