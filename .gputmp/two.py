import json,sys,os,socket,tempfile,multiprocessing,faulthandler,time
sys.path.insert(0,'packages/engine-fsdp/tests')
from pathlib import Path
from helpers import *
import ranks_main, test_ranks as R
def child(job,i):
    log=open(f"/tmp/rank{i}.log","w"); faulthandler.dump_traceback_later(70,file=log,exit=True)
    t=time.time()
    for name in ("train","hurt","too_long","continued"):
        def wrap(f,name=name):
            def g(*a,**k):
                r=f(*a,**k); print(i,name,"%.1f"%(time.time()-t),flush=True); return r
            return g
        setattr(ranks_main,name,wrap(getattr(ranks_main,name)))
    ranks_main.main(job,i)
    faulthandler.cancel_dump_traceback_later(); print(i,"done %.1f"%(time.time()-t),flush=True)
tmp=Path(tempfile.mkdtemp())
folders={n:write_model(tmp/n,CONFIGS[n]) for n in ("qwen2","qwen3")}
cases={"sharded":("qwen2",{"dtype":"fp32"}),"tied":("qwen3",{"dtype":"fp32","gradient_checkpointing":True}),"kept":("qwen2",{"dtype":"fp32","reshard_after_forward":False,"sync_every_micro_batch":False}),"hybrid":("qwen2",{"dtype":"fp32","fsdp_size":1})}
s=socket.socket(); s.bind(("127.0.0.1",0)); port=s.getsockname()[1]; s.close()
outs=[tmp/f"o-{i}" for i in range(2)]
job={"rendezvous":f"127.0.0.1:{port}","outs":[str(o) for o in outs],"cases":{k:(str(folders[m]),s) for k,(m,s) in cases.items()},"save":str(tmp/"ck")}
ctx=multiprocessing.get_context("fork")
ps=[ctx.Process(target=child,args=(job,i)) for i in range(2)]
[p.start() for p in ps]; [p.join(100) for p in ps]
print([p.exitcode for p in ps])
for i in range(2): print(open(f"/tmp/rank{i}.log").read()[:3500])
for k,(m,_) in cases.items():
    for o in outs:
        if (o/f"{k}.json").exists(): print(k,"gradient error",worst(R.loaded(o/f"{k}-grads.npz"),reference(folders[m])[1]),json.loads((o/f"{k}.json").read_text())["steps"])
