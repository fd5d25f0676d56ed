"""Train a byte-level GPT on the source of Python's standard library, with flash_cuda's attention.

  python examples/train_gpt.py                                  on a GPU if there is one
  python examples/train_gpt.py --preset gpt2 --context 16384 --batch 1
  python examples/train_gpt.py --checkpoint run.pt              later: --resume run.pt --steps 2000
  python examples/train_gpt.py --attention standard --log standard.json
  python examples/train_gpt.py --attention sdpa-cudnn           one backend of PyTorch's SDPA

bench/train_curves.py compares the kinds' loss curves, bench/train_context.py their contexts.
"""

import argparse
import hashlib
import json
import math
import os
import resource
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

# Read when torch is loaded: idle threads sleep. Spinning ones cost tenfold on a busy CPU.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

SETTINGS = ("context", "batch", "layers", "heads", "dim", "steps", "lr")
PRESETS = {  # `cpu` takes about a minute on two cores
    "cpu": (256, 8, 4, 4, 128, 200, 2e-3),
    "small": (1024, 32, 6, 6, 384, 500, 1e-3),
    "gpt2": (1024, 16, 12, 12, 768, 200, 6e-4),
}
SDPA_BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
KINDS = ("flash_cuda", "sdpa", *SDPA_BACKENDS, "standard")
WARMUP_STEPS = 1  # not in tokens/s: libraries load, cuDNN plans, memory is allocated
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}


# --- text: every 20th file is for validation


def standard_library() -> tuple[Tensor, Tensor, str]:
    """Training bytes, validation bytes (uint8) and a hash that says which text they are."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path.relative_to(root)
        for path in root.rglob("*.py")
        if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)
    )
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for index, path in enumerate(files):
        parts[index % 20 == 19].append((root / path).read_bytes())
    texts = [bytearray(b"\n".join(part)) for part in parts]
    train, validation = (torch.frombuffer(text, dtype=torch.uint8) for text in texts)
    return train, validation, hashlib.sha256(texts[0] + texts[1]).hexdigest()[:16]


def batch_of(text: Tensor, batch: int, context: int, random: torch.Generator) -> Tensor:
    """(batch, context + 1) int64: random windows of the text."""
    begins = torch.randint(len(text) - context - 1, (batch, 1), generator=random)
    return text[begins + torch.arange(context + 1)].long()


# --- attention: (b, s, h, d) x 3 -> (b, s, h, d), causal


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # (b, h, s, s)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def sdpa_by(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """PyTorch raises RuntimeError where the backend does not serve device, dtype or shape."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):  # the backward is that of the backend which ran the forward
            return sdpa(q, k, v)

    return attend


def attention_of(kind: str, kernel: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if kind in SDPA_BACKENDS:
        return sdpa_by(SDPA_BACKENDS[kind])
    if kind != "flash_cuda":
        return {"standard": standard, "sdpa": sdpa}[kind]
    try:
        import flash_cuda
    except ImportError as error:
        sys.exit(f"flash_cuda cannot be imported ({error}); run `pip install .` in its folder")
    return lambda q, k, v: flash_cuda.attention(q, k, v, causal=True, kernel=kernel)


# --- model: pre-norm transformer, rotary positions, tied embedding


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding; x (b, s, h, d), cos and sin (s, 1, d / 2) of x's dtype."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, attention: Callable) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).unbind(2)
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        out = self.attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.proj(out.reshape(b, s, dim))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers: int, heads: int, dim: int, attention: Callable) -> None:
        super().__init__()
        self.half_head = dim // heads // 2
        self.embedding = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, attention) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:  # residual projections start smaller, as in GPT-2
                last = name.endswith(("proj.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers if last else 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """(b, s) -> logits (b, s, 256)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        steps = torch.arange(self.half_head, device=tokens.device) / self.half_head
        angles = (positions[:, None] * 10000.0**-steps)[:, None]  # (s, 1, d / 2)
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embedding.weight)


# --- training


@dataclass
class Report:
    """What a run leaves behind; vars() of it is the --log file."""

    attention: str
    context: int
    settings: dict
    data: str
    losses: list[float] = field(default_factory=list)
    validation_loss: float | None = None
    tokens_per_s: float | None = None
    peak_gib: float | None = None
    sample: str = ""
    oom: bool = False


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.train_text, self.validation_text, digest = standard_library()
        torch.manual_seed(args.seed)
        attention = attention_of(args.attention, args.kernel)
        self.model = GPT(args.layers, args.heads, args.dim, attention).to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.random = torch.Generator().manual_seed(args.seed)
        settings = {k: getattr(args, k) for k in (*SETTINGS, "seed", "dtype", "kernel")}
        self.report = Report(args.attention, args.context, settings, digest)
        if args.resume:
            self.load(args.resume)

    def precision(self) -> torch.autocast:
        enabled = self.args.dtype == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def loss(self, tokens: Tensor) -> Tensor:
        tokens = tokens.to(self.device)
        with self.precision():
            logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def step(self) -> float:
        args, done = self.args, len(self.report.losses)
        for group in self.optimizer.param_groups:  # warm-up, then constant: a run can be prolonged
            group["lr"] = args.lr * min(1.0, (done + 1) / 50)
        loss = self.loss(batch_of(self.train_text, args.batch, args.context, self.random))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.report.losses.append(loss.item())  # waits for the GPU, so the clock is right
        return self.report.losses[-1]

    @torch.no_grad()
    def validate(self) -> float:
        random = torch.Generator().manual_seed(1)  # the same windows in every run
        text, args = self.validation_text, self.args
        windows = [batch_of(text, args.batch, args.context, random) for _ in range(4)]
        return sum(self.loss(tokens).item() for tokens in windows) / len(windows)

    @torch.no_grad()
    def sample(self, prompt: str = "def ", length: int = 200) -> str:
        random = torch.Generator().manual_seed(self.args.seed)
        tokens = torch.tensor([list(prompt.encode())], device=self.device)
        for _ in range(length):
            with self.precision():
                logits = self.model(tokens[:, -min(self.args.context, 128) :])[0, -1]
            chosen = (logits.float() / 0.8).softmax(-1).cpu().multinomial(1, generator=random)
            tokens = torch.cat([tokens, chosen[None].to(self.device)], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": self.random.get_state(),
            "losses": self.report.losses,
            "settings": self.report.settings,
        }
        torch.save(state, f"{path}.part")
        os.replace(f"{path}.part", path)  # an interrupted save leaves the old checkpoint whole

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        for key, value in state["settings"].items():
            if key not in ("steps", "kernel") and value != self.report.settings[key]:
                sys.exit(f"{path} was made with --{key} {value}, not {self.report.settings[key]}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.random.set_state(state["random"].cpu())
        self.report.losses = state["losses"]

    def peak_gib(self) -> float:
        """Of the GPU's tensors; on a CPU of the whole process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    def run(self) -> None:
        args, report = self.args, self.report
        seconds = []
        for step in progress(range(len(report.losses), args.steps), args):
            begin = time.perf_counter()
            loss = self.step()
            seconds.append(time.perf_counter() - begin)
            report.tokens_per_s = median_speed(seconds, args.batch * args.context)
            report.peak_gib = self.peak_gib()
            speed = f"{report.tokens_per_s or 0:,.0f} tokens/s"
            show(args, step, f"loss {loss:.3f}, {speed}, {report.peak_gib:.2f} GiB")
            if args.checkpoint and ((step + 1) % 100 == 0 or step + 1 == args.steps):
                self.save(args.checkpoint)


def median_speed(seconds: list[float], tokens: int) -> float | None:
    """Tokens/s of the median of recent steps, so that one that was interrupted changes little."""
    timed = seconds[WARMUP_STEPS:][-200:]
    return tokens / statistics.median(timed) if timed else None


def progress(steps: Iterable[int], args: argparse.Namespace) -> Iterable[int]:
    """tqdm's bar where tqdm is installed and the output is a terminal; `show` prints otherwise."""
    args.bar = None
    if tqdm is not None and sys.stderr.isatty():
        args.bar = steps = tqdm(steps, initial=steps.start, total=steps.stop, unit="step")
    return steps


def show(args: argparse.Namespace, step: int, text: str) -> None:
    if args.bar is not None:
        args.bar.set_postfix_str(text)
    elif (step + 1) % max(args.steps // 10, 1) == 0:
        print(f"step {step + 1}/{args.steps}: {text}", flush=True)


def train(args: argparse.Namespace, measure_only: bool = False) -> Report:
    """One run; running out of GPU memory is an outcome of it, not an error."""
    report = Report(args.attention, args.context, {}, "")
    try:
        trainer = Trainer(args)
        report = trainer.report
        trainer.run()
        if not measure_only:
            report.validation_loss, report.sample = trainer.validate(), trainer.sample()
    except torch.OutOfMemoryError:
        report.oom = True
    return report


def describe(report: Report) -> str:
    row = f"{report.attention} | context {report.context:,} | "
    if report.oom:
        return row + "out of memory"
    row += f"{report.tokens_per_s or 0:,.0f} tokens/s | peak {report.peak_gib or 0:.2f} GiB"
    if report.validation_loss is None:
        return row
    return f"{row} | validation loss {report.validation_loss:.4f} nats per byte"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Options; sizes that are not given come from the preset, the preset from the device."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--preset", choices=PRESETS, help="default: small on a GPU, cpu elsewhere")
    p.add_argument(
        "--attention", choices=KINDS, default="flash_cuda", help="sdpa: the backend PyTorch picks"
    )
    p.add_argument("--kernel", default="auto", help="kernel of flash_cuda")
    for name in SETTINGS:
        p.add_argument(f"--{name}", type=float if name == "lr" else int)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="default: bf16 autocast on a GPU, else fp32"
    )
    p.add_argument(
        "--checkpoint", type=Path, help="file to save to, every 100 steps and at the end"
    )
    p.add_argument("--resume", type=Path, help="checkpoint to go on from, up to --steps")
    p.add_argument("--log", type=Path, help="JSON file for the losses and all figures")
    args = p.parse_args(argv)
    on_gpu = args.device.startswith("cuda")
    preset = PRESETS[args.preset or ("small" if on_gpu else "cpu")]
    for name, value in zip(SETTINGS, preset, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.dtype = args.dtype or ("bf16" if on_gpu else "fp32")
    if args.dim % (2 * args.heads):
        p.error(f"--dim must be an even multiple of --heads, got {args.dim} and {args.heads}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    sizes = ", ".join(f"{name} {getattr(args, name)}" for name in SETTINGS)
    print(f"{args.attention} attention on {args.device}, {args.dtype}: {sizes}", flush=True)
    report = train(args)
    print(describe(report))
    if report.sample:
        print(f"--- sample\n{report.sample}\n---")
    if args.log:
        args.log.write_text(json.dumps(vars(report), indent=1) + "\n")
    return 1 if report.oom else 0


if __name__ == "__main__":
    sys.exit(main())
