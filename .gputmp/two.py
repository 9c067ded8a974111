import json,sys,os,socket,tempfile,subprocess
sys.path.insert(0,'packages/engine-fsdp/tests')
from pathlib import Path
from helpers import *
import test_ranks as R
tmp=Path(tempfile.mkdtemp())
folders={n:write_model(tmp/n,CONFIGS[n]) for n in ("qwen2","qwen3")}
def job(cases,world,**kw):
    s=socket.socket(); s.bind(("127.0.0.1",0)); port=s.getsockname()[1]; s.close()
    outs=[tmp/f"o-{world}-{i}" for i in range(world)]
    r=subprocess.run([sys.executable,'packages/engine-fsdp/tests/ranks_main.py',json.dumps([{"rendezvous":f"127.0.0.1:{port}","outs":[str(o) for o in outs],"cases":cases,**kw}])],capture_output=True,text=True,timeout=200)
    print("rc",r.returncode,r.stderr[-3000:] if r.returncode else "")
    return outs
cases={"sharded":("qwen2",{"dtype":"fp32"}),"tied":("qwen3",{"dtype":"fp32","gradient_checkpointing":True}),"kept":("qwen2",{"dtype":"fp32","reshard_after_forward":False,"sync_every_micro_batch":False}),"hybrid":("qwen2",{"dtype":"fp32","fsdp_size":1})}
outs=job({k:(str(folders[m]),s) for k,(m,s) in cases.items()},2,save=str(tmp/"ck"))
for k,(m,_) in cases.items():
    for o in outs:
        print(k,"gradient error",worst(R.loaded(o/f"{k}-grads.npz"),reference(folders[m])[1]),json.loads((o/f"{k}.json").read_text())["steps"])
