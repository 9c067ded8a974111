import torch,time,sys
from coupler_engine_fsdp.logprobs import token_logprobs
from torch.profiler import profile, ProfilerActivity
R,H,V=4096,2048,151936
h=torch.randn(R,H,device="cuda",dtype=torch.bfloat16,requires_grad=True)
w=(torch.randn(V,H,device="cuda")*3*H**-.5).bfloat16().requires_grad_()
t=torch.randint(0,V,(R,),device="cuda"); temp=torch.rand(R,device="cuda")+.5; g=torch.randn(R,device="cuda")
def run(chunk):
    lp,_=token_logprobs(h,w,None,t,temp,False,chunk); return torch.autograd.grad((lp*g).sum(),[h,w])
for chunk in (2**23,):
    run(chunk); torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU,ProfilerActivity.CUDA]) as p:
        run(chunk); torch.cuda.synchronize()
    print(p.key_averages().table(sort_by="cuda_time_total",row_limit=22,max_name_column_width=60))
def bench(f,n=20):
    f();torch.cuda.synchronize();s=time.time()
    for _ in range(n): f()
    torch.cuda.synchronize(); return (time.time()-s)/n*1e6
for width in (512,1024,2048,8192):
    wt=w.detach()[:width]; hd=h.detach(); z=torch.randn(R,width,device="cuda"); zb=z.bfloat16(); acc=torch.zeros(R,H,device="cuda"); gw=torch.empty(width,H,device="cuda",dtype=torch.bfloat16)
    print(width,dict(
     mm_f32=bench(lambda: torch.mm(hd,wt.t(),out_dtype=torch.float32)), mm_bf=bench(lambda: torch.mm(hd,wt.t())),
     lse=bench(lambda: z.logsumexp(1)), exp=bench(lambda: z.exp()), div=bench(lambda: z.div_(temp[:,None])), amax=bench(lambda: z.amax(1)),
     scat=bench(lambda: z.scatter_add_(1,torch.zeros(R,1,dtype=torch.long,device="cuda"),temp[:,None])),
     to=bench(lambda: z.to(torch.bfloat16)), dh=bench(lambda: torch.mm(zb,wt,out_dtype=torch.float32)), dhbf=bench(lambda: torch.mm(zb,wt)), dhadd=bench(lambda: torch.addmm(acc,zb,wt,out_dtype=torch.float32)),
     dw=bench(lambda: torch.mm(zb.t(),hd,out=gw)), add=bench(lambda: acc.add_(acc))))
from torch.nn.attention.varlen import varlen_attn
q=torch.randn(100,8,64,device="cuda",dtype=torch.bfloat16,requires_grad=True);k=torch.randn(100,2,64,device="cuda",dtype=torch.bfloat16,requires_grad=True)
cu=torch.tensor([0,40,100],device="cuda",dtype=torch.int32)
try:
    o=varlen_attn(q,k,k,cu,cu,60,60,window_size=(-1,0)); 
    kk=k.repeat_interleave(4,1); o2=varlen_attn(q,kk,kk,cu,cu,60,60,window_size=(-1,0)); print("gqa works",(o-o2).abs().max().item()); (o*o.detach()).sum().backward(); print(k.grad.shape)
except Exception as e: print("gqa fails",repr(e)[:300])
import inspect; print(inspect.getsource(varlen_attn)[-1500:])
