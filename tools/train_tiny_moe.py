"""Train hotrack-tiny-moe, a toy Qwen3-MoE on tasks with checkable answers; or evaluate a checkpoint of it.

    python tools/train_tiny_moe.py                  # minutes on a GPU, hours on a CPU; writes the checkpoint
    python tools/train_tiny_moe.py --eval FOLDER    # about a minute on a CPU

Needs torch, numpy, safetensors and tokenizers.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_moe_data import ANSWER, PROMPT, TEXT, Phase, stream_batches
from tiny_moe_eval import Report, answer_all, evaluate, right_by_task
from tiny_moe_files import write_results, write_side_files
from tiny_moe_model import Config, TinyMoe, load_model, save_weights
from tiny_moe_tasks import draw_set

CHECKPOINT = Path(__file__).parent.parent / "src" / "hotrack" / "demo_models" / "hotrack-tiny-moe"

LOSS_WEIGHTS = {PROMPT: 0.03, ANSWER: 1.0, TEXT: 0.15}
"""A little weight on prompts keeps text readable when generation runs on past the end of an answer."""

PHASES = ((0.85, 256), (0.15, 1024))
"""(share of the steps, row length): short rows first, then conversations as long as the context."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one training run depends on."""

    seed: int
    steps: int
    tokens_per_step: int
    lr: float
    warmup: int
    weight_decay: float = 0.05
    balance: float = 0.01
    z_loss: float = 1e-4

    def phases(self) -> list[Phase]:
        """Split the steps into phases of growing row length."""
        ends = [round(self.steps * sum(share for share, _ in PHASES[: n + 1])) for n in range(len(PHASES))]
        starts = [0, *ends[:-1]]
        return [
            Phase(end - start, max(1, self.tokens_per_step // length), length)
            for start, end, (_, length) in zip(starts, ends, PHASES, strict=True)
            if end > start
        ]

    def lr_at(self, step: int) -> float:
        """Warm up linearly, hold for half of the run, then fall linearly to nothing."""
        done = step / self.steps
        return self.lr * min(1.0, (step + 1) / self.warmup, max(0.0, (1 - done) / 0.5))


def batch_loss(model: TinyMoe, ids: Tensor, classes: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return the loss and, to log, [answer loss, balance, z] for [B, T + 1] tokens and loss classes."""
    logits, aux = model(ids[:, :-1])
    targets, kinds = ids[:, 1:].flatten(), classes[:, 1:].flatten()
    each = F.cross_entropy(logits.float().flatten(0, 1), targets, reduction="none")
    weights = sum((kinds == kind).float() * weight for kind, weight in LOSS_WEIGHTS.items())
    assert isinstance(weights, Tensor)
    is_answer = (kinds == ANSWER).float()
    loss = (each * weights).sum() / weights.sum()
    loss = loss + recipe.balance * aux[0] + recipe.z_loss * aux[1]
    answer_loss = (each * is_answer).sum() / is_answer.sum().clamp(min=1)
    return loss, torch.stack((answer_loss, aux[0], aux[1])).detach()


class Trainer:
    """One model, its optimizer, and one call per step; on a GPU the step is one CUDA graph per batch shape.

    A shape's first steps run as usual on a side stream, as capturing requires; later ones are replays.
    """

    EAGER_STEPS = 3

    def __init__(self, model: TinyMoe, recipe: Recipe, device: str, graphs: bool) -> None:
        self.model, self.recipe = model, recipe
        self.on_gpu, self.graphs = device.startswith("cuda"), graphs and device.startswith("cuda")
        self.lr = torch.tensor(recipe.lr, device=device)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.lr, betas=(0.9, 0.98), fused=True, capturable=self.on_gpu
        )
        self.batch = torch.empty(0, dtype=torch.int16, device=device)
        self.shown = torch.zeros(3, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.steps_in_shape = 0

    def step(self, batch: Tensor, lr: float) -> None:
        """Train on one [2, B, T + 1] int16 batch of tokens and loss classes."""
        if batch.shape != self.batch.shape:
            self.graph, self.steps_in_shape = None, 0
            self.batch = torch.empty(batch.shape, dtype=batch.dtype, device=self.batch.device)
        self.batch.copy_(batch.pin_memory() if self.on_gpu else batch, non_blocking=True)
        self.lr.fill_(lr)
        self.steps_in_shape += 1
        if not self.graphs:
            self._update()
        elif self.steps_in_shape <= self.EAGER_STEPS:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._update()
            torch.cuda.current_stream().wait_stream(side)
        else:
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                self.optimizer.zero_grad(set_to_none=True)
                with torch.cuda.graph(self.graph):
                    self._update()
            self.graph.replay()

    def _update(self) -> None:
        """Forward, backward and optimizer step on ``self.batch``; leaves what to log in ``self.shown``."""
        ids, classes = self.batch.long()
        with torch.autocast("cuda", torch.bfloat16, enabled=self.on_gpu, cache_enabled=False):
            loss, shown = batch_loss(self.model, ids, classes, self.recipe)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.shown.copy_(shown)


def save_checkpoint(model: TinyMoe, folder: Path) -> None:
    """Write the weights and the files around them."""
    write_side_files(folder, model.config)
    save_weights(model, folder)


def monitor(folder: Path, device: str) -> str:
    """Describe how the saved weights do on instances of the development split."""
    instances = draw_set(0, "dev", 64)
    shares = right_by_task(instances, answer_all(load_model(folder, torch.bfloat16, device), instances).texts)
    return "dev: " + "  ".join(f"{task} {share:.0%}" for task, share in shares.items())


def train(model: TinyMoe, recipe: Recipe, device: str, workers: int, folder: Path, graphs: bool) -> None:
    """Train in place; now and then save the weights to ``folder`` and measure them."""
    trainer = Trainer(model, recipe, device, graphs)
    every = max(1, recipe.steps // 8)
    started = marked = time.perf_counter()
    last, waited = -1, 0.0
    batches = stream_batches(recipe.seed, recipe.phases(), workers)
    for step in range(recipe.steps):
        asked = time.perf_counter()
        batch = torch.from_numpy(next(batches))
        waited += time.perf_counter() - asked
        trainer.step(batch, recipe.lr_at(step))
        if step % max(1, every // 4) == 0 or step + 1 == recipe.steps:
            answer_loss, balance, z_loss = trainer.shown.tolist()
            now, done = time.perf_counter(), step - last
            print(
                f"step {step:6d}  answer loss {answer_loss:.4f}  balance {balance:.3f}  z {z_loss:.2f}  "
                f"row {batch.shape[2] - 1}  {(now - marked) / done * 1e3:.2f} ms/step "
                f"(data {waited / done * 1e3:.2f})  {now - started:.0f} s",
                flush=True,
            )
            marked, last, waited = now, step, 0.0
        if (step + 1) % every == 0 and step + 1 < recipe.steps:
            save_checkpoint(model, folder)
            print(monitor(folder, device), flush=True)
            marked, last = time.perf_counter(), step
    save_checkpoint(model, folder)


def recorded_stages(folder: Path) -> list[dict[str, Any]]:
    """Return the training stages that a checkpoint's ``eval.json`` records."""
    results = folder / "eval.json"
    stages: list[dict[str, Any]] = json.loads(results.read_text())["training"] if results.exists() else []
    return stages


def report_checkpoint(
    folder: Path, per_task: int, dtype: str, device: str, stages: list[dict[str, Any]]
) -> Report:
    """Evaluate a checkpoint on the test split; write ``eval.json`` and the card; print the table."""
    started = time.perf_counter()
    model = load_model(folder, getattr(torch, dtype), device)
    report = evaluate(model, per_task)
    c = model.config
    total = sum(p.numel() for p in model.parameters())
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    idle = c.num_hidden_layers * (c.num_experts - c.num_experts_per_tok) * expert
    sizes = {"parameters": total, "active_parameters": total - idle}
    write_results(folder, c, {**report.to_json(), **sizes, "training": stages}, report.table())
    spent = time.perf_counter() - started
    print(f"{report.table()}\n{total} parameters; evaluated in {spent:.0f} s as {dtype} on {device}")
    return report


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--eval", type=Path, metavar="FOLDER", help="evaluate this checkpoint instead of training"
    )
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="where the checkpoint goes")
    parser.add_argument("--init", type=Path, metavar="FOLDER", help="continue from this checkpoint's weights")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=18000)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens per step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=300)
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 1)))
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help="train without CUDA graphs")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="evaluation arithmetic"
    )
    parser.add_argument("--per-task", type=int, default=300, help="evaluation instances per task")
    return parser.parse_args(argv)


def main() -> None:
    """Run the command line."""
    args = parse_args()
    torch.set_float32_matmul_precision("high")
    if args.eval is not None:
        report_checkpoint(args.eval, args.per_task, args.dtype, args.device, recorded_stages(args.eval))
        return
    recipe = Recipe(args.seed, args.steps, args.tokens, args.lr, args.warmup)
    if args.init is not None:
        model, stages = load_model(args.init, torch.float32, args.device).train(), recorded_stages(args.init)
    else:
        model, stages = TinyMoe(Config()), []
        model.initialise(recipe.seed)
    started = time.perf_counter()
    train(model.to(args.device), recipe, args.device, args.workers, args.out, args.graphs)
    flags = f"--seed {args.seed} --steps {args.steps} --tokens {args.tokens} --lr {args.lr}"
    flags += f" --warmup {args.warmup}" + (" --init FOLDER" if args.init is not None else "")
    stage = {
        "command": f"python tools/train_tiny_moe.py {flags}",
        "seconds": round(time.perf_counter() - started, 1),
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU",
    }
    report_checkpoint(args.out, args.per_task, args.dtype, args.device, [*stages, stage])


if __name__ == "__main__":
    main()
