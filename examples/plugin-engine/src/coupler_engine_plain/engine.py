"""``engine=plain``: a transformers model under torch's AdamW, on one rank."""

import math

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from coupler import Engine, Layout, Part, StepResult
from coupler.batch.columns import loss_columns
from coupler.engine_kit.adamw import multiplier
from coupler.engine_kit.micro_batches import split
from coupler.errors import CouplerError
from coupler.metrics import merge, read

FILES = {Part.PARAMS: "params.safetensors", Part.OPTIMIZER: "optimizer.safetensors"}


class Done:
    """A save that is over when it is asked for."""

    def wait(self, seconds):
        return None


class PlainEngine(Engine):
    def setup(self, rank):
        if rank.world != 1:
            raise CouplerError("engine=plain runs on one rank.\n  set:  engine.ranks=1")
        self.hf = AutoModelForCausalLM.from_pretrained(
            self.model.path, dtype=torch.float32, trust_remote_code=self.model.trust_remote_code
        ).eval()  # without dropout: log-probs of training and of sampling are the same
        self.params = dict(self.hf.named_parameters())
        groups = [
            {"params": [p for p in self.params.values() if p.ndim > 1]},
            {"params": [p for p in self.params.values() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        c = self.config
        betas = (c.beta1, c.beta2)
        self.optimizer = torch.optim.AdamW(
            groups, betas=betas, eps=c.eps, weight_decay=c.weight_decay
        )
        self.steps = 0
        return Layout((0,), (True,))

    def forward(self, batch, want):
        done = {output.name: np.zeros(batch.num_tokens, np.float32) for output in want}
        batch = batch.with_tokens(row=np.arange(batch.num_tokens))
        with torch.no_grad():
            for part in self._micro_batches(batch):
                for name, values in self._outputs(part, want).items():
                    done[name][part["row"]] = values.numpy()
        return batch.without("row").with_tokens(**done)

    def forward_backward(self, batch, want, loss, step):
        self._clear()
        metrics = []
        for part in self._micro_batches(batch):
            arrays = loss_columns(part)
            columns = {name: torch.tensor(column) for name, column in arrays.items()}
            losses, found = loss(self._outputs(part, want), {**columns, "num_seqs": len(part)})
            torch.where(columns["loss_mask"], losses * columns["loss_weight"], 0.0).sum().backward()
            metrics.append(found)
        return read(merge(metrics))

    def _micro_batches(self, batch):
        try:
            groups = split(batch, self.config.max_tokens_per_gpu)
        except ValueError as error:
            raise CouplerError(f"{error}.\n  try:  a larger engine.max_tokens_per_gpu") from None
        return [batch.take(rows) for rows in groups if len(rows)]

    def _outputs(self, batch, want):
        """Return [T] columns, 0 outside the mask, whose gradient reaches no row
        there.
        """
        tokens = torch.tensor(batch["tokens"], dtype=torch.long)
        ids = pad_sequence(
            tokens.split(batch.lengths.tolist()), batch_first=True
        )  # causal: padding changes nothing
        logits = self.hf(input_ids=ids, use_cache=False).logits

        rows = np.flatnonzero(batch["loss_mask"])
        sequence = batch.spread(np.arange(len(batch)))[rows]
        position = rows - batch.starts[sequence]
        temperature = (
            batch["temperature"][sequence] if batch.has("temperature") else np.ones(len(rows))
        )
        scale = torch.tensor(temperature, dtype=torch.float32)[:, None]
        log_p = (logits[sequence, position - 1] / scale).log_softmax(-1)

        rows = torch.tensor(rows)
        computed = {
            "logprobs": lambda: log_p.gather(1, tokens[rows, None])[:, 0],
            "entropy": lambda: -(log_p.exp() * log_p).sum(-1),
        }
        zeros = torch.zeros(len(tokens))
        return {output.name: zeros.index_copy(0, rows, computed[output.name]()) for output in want}

    def step(self):
        c = self.config
        lr = c.lr * multiplier(c)(self.steps)
        norm = float(clip_grad_norm_(self.params.values(), c.max_grad_norm or math.inf))
        applied = math.isfinite(norm)
        if applied:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.steps += 1
        self._clear()
        return StepResult(applied=applied, grad_norm=norm, lr=lr)

    def _clear(self):
        for param in self.params.values():
            param.grad = torch.zeros_like(param)

    def weights(self):
        for name, param in self.params.items():
            yield name, param.detach()

    def gradients(self):
        for name, param in self.params.items():
            yield name, param.grad

    def save(self, path, what):
        if Part.PARAMS in what:
            save_file(
                {name: p.detach() for name, p in self.params.items()}, path / FILES[Part.PARAMS]
            )
        if Part.OPTIMIZER in what:
            state = {
                f"{key}/{name}": value
                for name, param in self.params.items()
                for key, value in self.optimizer.state[param].items()
            }
            save_file({"steps": torch.tensor(self.steps), **state}, path / FILES[Part.OPTIMIZER])
        return Done()

    def load(self, path, what):
        if Part.PARAMS in what:
            with torch.no_grad():
                for name, tensor in load_file(path / FILES[Part.PARAMS]).items():
                    self.params[name].copy_(tensor)
        if Part.OPTIMIZER in what:
            state = load_file(path / FILES[Part.OPTIMIZER])
            self.steps = int(state.pop("steps"))
            self.optimizer.state.clear()
            for name, tensor in state.items():
                key, _, param = name.partition("/")
                self.optimizer.state[self.params[param]][key] = tensor
