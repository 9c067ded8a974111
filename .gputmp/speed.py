import time, torch, numpy as np, tempfile, sys
from pathlib import Path
sys.path.insert(0,'packages/engine-fsdp/tests')
from helpers import *
from transformers import Qwen2Config
import inspect
from torch.nn.attention.varlen import varlen_attn
print(torch.__version__, inspect.signature(varlen_attn))
cfg=Qwen2Config(vocab_size=151936,hidden_size=896,intermediate_size=4864,num_hidden_layers=24,num_attention_heads=14,num_key_value_heads=2,tie_word_embeddings=True,max_position_embeddings=32768)
d=Path(tempfile.mkdtemp())
with torch.device("cuda"):
    m=AutoModelForCausalLM.from_config(cfg,dtype=torch.bfloat16)
m.save_pretrained(d)
n=sum(p.numel() for p in m.parameters()); del m
rng=np.random.default_rng(0); L=rng.integers(200,2000,64); T=int(L.sum())
mask=np.ones(T,bool); mask[np.cumsum(L)-L]=False
b=Batch(L,{"tokens":rng.integers(0,150000,T).astype(np.int32),"loss_mask":mask,"loss_weight":(mask/T).astype(np.float32),"advantages":np.ones(T,np.float32)})
W1=(Output("logprobs"),)
nll=lambda o,c:(-o["logprobs"],{})
for want in (W1,WANT):
  for kw in (dict(gradient_checkpointing=False),dict(gradient_checkpointing=True),dict(gradient_checkpointing=False,logits_tile=2**23),dict(gradient_checkpointing=False,logits_tile=2**25)):
    torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
    t=time.time(); e=make_engine(d,max_tokens_per_gpu=16384,**kw); ts=time.time()-t
    tt=[]
    for i in range(4):
        torch.cuda.synchronize(); t=time.time(); e.forward_backward(b,want,nll,info(b,i)); r=e.step(); torch.cuda.synchronize(); tt.append(time.time()-t)
    t=time.time(); e.forward(b,want); torch.cuda.synchronize(); tf=time.time()-t
    t=time.time(); k=sum(w.numel() for _,w in e.weights()); torch.cuda.synchronize(); tw=time.time()-t
    print(len(want),kw,"setup %.1fs"%ts,"T",T,"step",["%.3f"%x for x in tt],"tok/s %.0f"%(T/tt[-1]),"TFLOP/s 6NT %.0f"%(6*n*T/tt[-1]/1e12),"fwd %.3f"%tf,"weights %.3f"%tw,"peak GB %.1f"%(torch.cuda.max_memory_allocated()/2**30),r,flush=True)
    del e
