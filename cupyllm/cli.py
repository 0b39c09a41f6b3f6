"""The `cupyllm` command: options and exit statuses. The work is in cupyllm/commands, imported when a command runs.

Exit status: 0 success; 1 what the command checks does not hold; 2 bad usage, bad input or a machine that lacks
something (one line on stderr); 130 interrupted; 141 the reader of stdout went away. Any other failure is a bug of
ours and keeps its traceback. What the simulator finds in a kernel is a check that does not hold: status 1, one line a
finding on stderr, with --json too, since there is no result to print.
"""

from __future__ import annotations

import errno
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from cupyllm import __version__
from cupyllm.errors import CupyllmError

CHECK_FAILED, USAGE_ERROR, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
SIZES = ("0.6b", "1.7b", "4b", "8b", "14b", "32b")
MAX_LAYERS, MAX_STEPS = 10_000, 1_000_000
BENCH_PEERS, BENCH_FORMS = ("torch", "cublas"), ("forward", "dgrad", "wgrad")
BENCH_PROJECTIONS, MAX_BENCH_ROWS = ("qkv", "q", "kv", "o", "gate-up", "down"), 1 << 20
BENCH_FORMATS = ("int8", "int4", "nf4")
STREAM_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
FLOAT32_MAX = 3.4028234663852886e38

F = TypeVar("F", bound=Callable[..., Any])


class Commands(click.Group):
    """A group whose errors are one line on stderr, whoever raised them."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        """Always ends in SystemExit. click's own prints an empty line at an interrupt and gives 1 for a broken pipe."""
        try:
            _check_streams()
            name = prog_name or "cupyllm"
            self._main_shell_completion({}, name)
            try:
                with self.make_context(name, list(sys.argv[1:] if args is None else args), **extra) as context:
                    result = self.invoke(context)
            except click.exceptions.Exit as error:  # --help, --version
                result = error.exit_code
            sys.stdout.flush()
            sys.exit(result if isinstance(result, int) else 0)
        except (KeyboardInterrupt, click.Abort):
            fail("interrupted", INTERRUPTED)
        except CupyllmError as error:
            if not _found_in_a_kernel(error):
                fail(str(error))
            first, *more = str(error).splitlines()
            fail(first, CHECK_FAILED, more)
        except MemoryError as error:
            fail(f"not enough host memory: {error or 'an allocation failed'}; use a smaller shape or fewer tokens")
        except click.exceptions.NoArgsIsHelpError:
            fail(f"no command was given, expected one of {', '.join(self.commands)}; see `cupyllm --help`")
        except click.UsageError as error:
            where = f"; see `{error.ctx.command_path} --help`" if error.ctx is not None else ""
            fail(error.format_message().rstrip(".") + where)
        except click.ClickException as error:
            fail(error.format_message())
        except OSError as error:
            # Failures of files are StorageError and CheckpointError by now: what has no name is a standard stream.
            if error.filename is not None or error.errno not in STREAM_ERRORS:
                raise
            _stdout_failed(error)


def _check_streams() -> None:
    """Python has None for a stream that is closed; printing to None goes to stdout or nowhere."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    if sys.stdin is None:
        sys.stdin = open(os.devnull)
    if sys.stdout is None:
        fail("stdout is closed, expected somewhere to print to; use >/dev/null to discard the output")


def _stdout_failed(error: OSError) -> None:
    """Exit as it becomes a stdout that takes no more: 141 without a reader, else 2 and one line."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail too
    if error.errno == errno.EPIPE:
        sys.exit(BROKEN_PIPE)
    name = errno.errorcode[error.errno or 0]
    fail(f"cannot write to stdout: {error.strerror} ({name}), expected somewhere with room; redirect it elsewhere")


def _found_in_a_kernel(error: CupyllmError) -> bool:
    from cupyllm.sim.report import SimError

    return isinstance(error, SimError)


def fail(message: str, status: int = USAGE_ERROR, more: Sequence[str] = ()) -> None:
    """One line on stderr, and those of `more` below it, then exit."""
    try:
        print("\n  ".join([f"cupyllm: error: {' '.join(message.split())}", *more]), file=sys.stderr, flush=True)
    except OSError:  # nobody to tell; the status does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    sys.exit(status)


class Positive(click.FloatRange):
    """A number over 0 that float32 holds; click's range lets NaN through."""

    def __init__(self) -> None:
        super().__init__(min=0, max=FLOAT32_MAX, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number, expected one over 0.", param, ctx)
        return number


class Several(click.ParamType):
    """Values that commas separate, each once: names, or numbers from 1."""

    name = "list"

    def __init__(self, choices: Sequence[str] = (), maximum: int = 0) -> None:
        self.choices, self.maximum = choices, maximum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        found = [self._one(word.strip(), param, ctx) for word in str(value).split(",")]
        for item in found:
            if found.count(item) > 1:
                self.fail(f"{item} is given twice, expected each value once.", param, ctx)
        return tuple(found)

    def _one(self, word: str, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self.choices:
            if word.lower() not in self.choices:
                self.fail(f"{word!r} is not one of {', '.join(self.choices)}.", param, ctx)
            return word.lower()
        if not (word.isascii() and word.isdigit()) or len(word) > 18 or not 1 <= int(word) <= self.maximum:
            self.fail(f"{word!r} is no number from 1 to {self.maximum}.", param, ctx)
        return int(word)


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several option decorators as one, in the order given."""

    def apply(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")
backend_option = click.option(
    "--backend",
    type=click.Choice(["auto", "cuda", "sim", "reference"]),
    default="auto",
    show_default=True,
    help="auto: the GPU when there is one, else the NumPy reference. sim: the GPU's kernels, simulated and checked.",
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Activations. Default: bfloat16 on a GPU with 16-bit weights, else float32.",
)
model_option = click.option(
    "--model", metavar="DIR", help="Checkpoint directory, or a repo id in the Hugging Face cache."
)
size_option = click.option(
    "--size", type=click.Choice(SIZES, case_sensitive=False), help="A Qwen3 shape with random weights, made once."
)
layers_option = click.option("--layers", type=click.IntRange(1, MAX_LAYERS), help="Only the first N layers.")
seed_option = click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Of random weights. Default: 0.")
yes_option = click.option("--yes", is_flag=True, help="Go ahead with a synthetic checkpoint over 8 GiB.")
variant_option = click.option(
    "--variant", "variants", multiple=True, metavar="OP=NAME", help="Force a kernel variant (doctor --variants)."
)
batch_invariant_option = click.option(
    "--batch-invariant", is_flag=True, help="Sum each row in one order however many rows there are; slower for few."
)
generation_options = options(
    click.option(
        "--model", metavar="DIR", required=True, help="Checkpoint directory, repo id in the cache, or smollm2."
    ),
    click.option("--greedy", is_flag=True, help="Always the likeliest token."),
    click.option("--temperature", type=float, metavar="T", help="0 is greedy. Default: generation_config.json's."),
    click.option("--top-k", type=int, metavar="K", help="Only the K likeliest tokens; 0 is off."),
    click.option("--top-p", type=float, metavar="P", help="Only the likeliest tokens that reach P together; 1 is off."),
    click.option("--min-p", type=float, metavar="P", help="Only tokens with P times the likeliest one's probability."),
    click.option("--repetition-penalty", type=float, metavar="X", help="Over 1 makes tokens rarer that were there."),
    click.option("--seed", type=int, metavar="N", help="Of the draws. Default: another one each time, and told."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeat for several."),
    click.option("--think/--no-think", default=None, help="For chat templates that know thinking."),
    click.option(
        "--kv-memory", metavar="SIZE", help="For the KV cache, e.g. 512MiB; on a GPU the rest is in host memory."
    ),
    click.option(
        "--stream/--resident", "stream", default=None, help="Weights layer by layer, or all at once if they fit."
    ),
    batch_invariant_option,
)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="cupyllm", message="%(prog)s %(version)s")
def cli() -> None:
    """Train and run Qwen3 models larger than your GPU's memory, and prove that the maths is right."""


@cli.command()
@options(model_option, size_option, layers_option, backend_option, dtype_option)
@click.option("--prompt", metavar="TEXT", help="Text to run.")
@click.option("--prompt-file", metavar="FILE", help="UTF-8 file to run.")
@click.option("--ids", metavar="FILE.npy", help="Token ids to run, integers [T] or [B,T].")
@click.option("--stream/--resident", "stream", default=None, help="Weights layer by layer (default) or all at once.")
@click.option("--check-lossless", is_flag=True, help="Run streamed and resident and compare every bit of the logits.")
@click.option("--logits-out", metavar="FILE.npy", help="Write the logits, float32 [B,T,V].")
@options(variant_option, batch_invariant_option, seed_option, yes_option, json_option)
def forward(**arguments: Any) -> int:
    """One pass over text or token ids, streamed layer by layer: loss, next tokens, speed, memory.

    With no --model and no --size, a small random model with Qwen3-32B's proportions and --layers (64) layers is made
    once in the cache. With no input, the first 256 tokens of a built-in text are run.
    """
    from cupyllm.commands import forward as command

    return command.run(**arguments)


@cli.command()
@click.option("--prompt", metavar="TEXT", help="Text to continue.")
@click.option("--prompt-file", metavar="FILE", help="UTF-8 file, one prompt a line.")
@click.option("--ids", metavar="IDS", help="Token ids to continue: 1,2,3 or a .npy file [T] or [B,T].")
@click.option("--chat", metavar="TEXT", help="A message, or a .json file of messages, through the chat template.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="A sequence; 128 by default.")
@click.option("--n", type=click.IntRange(1, 64), default=1, show_default=True, help="Continuations of each prompt.")
@click.option("--logprobs", type=click.IntRange(min=0), metavar="N", help="Each token's, and of the N likeliest.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the model's end tokens.")
@options(generation_options, backend_option, dtype_option)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a sequence, one a line, nothing else.")
def generate(**arguments: Any) -> int:
    """Continue text, token ids or a conversation."""
    from cupyllm.commands import generate as command

    return command.run(**arguments)


@cli.command()
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="An answer. Default: what the context has room for.")
@options(generation_options, backend_option, dtype_option)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object an answer, one a line, nothing else.")
def chat(**arguments: Any) -> int:
    """Talk with a model; /help says what else can be done. Reads lines from stdin where there is no terminal."""
    from cupyllm.commands import chat as command

    return command.run(**arguments)


@cli.command()
@click.option("--model", metavar="DIR", required=True, help="Checkpoint directory, or a repo id in the cache.")
@click.option("--ids", metavar="FILE.npy", required=True, help="Token ids, integers [T] or [B,T].")
@click.option("--labels", metavar="FILE.npy", help="Unshifted labels [T] or [B,T], -100 ignored. Default: the ids.")
@click.option("--out", metavar="FILE.safetensors", required=True, help="Where the gradients go, float32.")
@options(layers_option, backend_option, dtype_option, variant_option, json_option)
def grads(**arguments: Any) -> int:
    """Write the gradient of the mean next-token loss for every parameter."""
    from cupyllm.commands import grads as command

    return command.run(**arguments)


@cli.command("grad-check")
@click.option("--op", "ops", multiple=True, metavar="NAME", help="Only this op; repeat for several.")
@click.option("--layer", is_flag=True, help="Only the whole decoder layer (with --op: also the layer).")
@options(size_option, backend_option, dtype_option, json_option)
def grad_check(**arguments: Any) -> int:
    """Check every op and a whole layer against finite differences and the float64 reference."""
    from cupyllm.commands import grad_check as command

    return command.run(**arguments)


@cli.command("train-smoke")
@options(model_option, size_option, layers_option)
@click.option("--tokens", type=click.IntRange(min=2), help="Tokens of built-in text. Default: 256, on sim 32.")
@click.option("--steps", type=click.IntRange(1, MAX_STEPS), help="Optimizer steps. Default: 10, on sim 3.")
@click.option("--lr", type=Positive(), help="Learning rate. Default: 0.03 / hidden size.")
@click.option("--clip", type=Positive(), default=1.0, show_default=True, help="Norm.")
@options(backend_option, dtype_option, variant_option, seed_option, yes_option, json_option)
def train_smoke(**arguments: Any) -> int:
    """A few AdamW steps on one fixed batch; every loss must be below the one before.

    On --backend sim, which is slow, the default model has 2 layers, and tokens and steps are fewer.
    """
    from cupyllm.commands import train_smoke as command

    return command.run(**arguments)


@cli.command()
@options(size_option)
@click.option("--hidden", type=click.IntRange(min=1), help="Hidden size.")
@click.option("--layers", type=click.IntRange(1, MAX_LAYERS), help="Layers; with --size: only the first N.")
@click.option("--heads", type=click.IntRange(min=1), help="Query heads.")
@click.option("--kv-heads", type=click.IntRange(min=1), help="Key/value heads. Default: as --heads.")
@click.option("--head-dim", type=click.IntRange(min=2), help="Size of a head. Default: hidden / heads.")
@click.option("--ffn", type=click.IntRange(min=1), help="Feed-forward size.")
@click.option("--vocab", type=click.IntRange(min=1), help="Vocabulary size.")
@click.option("--tied/--untied", default=None, help="Whether the LM head is the embedding. Default: untied.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32", "float16"]), default="bfloat16", show_default=True)
@click.option("--out", metavar="DIR", required=True, help="A directory that does not exist or is empty.")
@options(seed_option, yes_option, json_option)
def synth(**arguments: Any) -> int:
    """Write a seeded random checkpoint in the Hugging Face layout; the same bits on every machine."""
    from cupyllm.commands import synth as command

    return command.run(**arguments)


@cli.command("import")
@click.argument("file", metavar="FILE.gguf")
@click.argument("out", metavar="OUT")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32", "float16"]),
    help="Of the weights. Default: as an unquantised file has them, bfloat16 for a quantised one.",
)
@json_option
def import_(**arguments: Any) -> int:
    """Turn a GGUF file (Llama, Qwen2 or Qwen3) into a Hugging Face checkpoint directory, its tokenizer included."""
    from cupyllm.commands import import_gguf as command

    return command.run(**arguments)


@cli.command("sim-check")
@click.option("--kernel", metavar="FILE.cu:NAME", help="A kernel to run once, under its C++ name or its symbol.")
@click.option("--grid", metavar="X,Y,Z", default="1", show_default=True, help="Blocks.")
@click.option("--block", metavar="X,Y,Z", help="Threads of a block.")
@click.option("--args", metavar="ARGS", default="", help="All in order: 'f32[64,128] y=f32[64]:empty 64 1e-6'.")
@click.option("--arg", metavar="ARG", multiple=True, help="One argument more; repeat for several.")
@click.option("--shared-bytes", type=click.IntRange(min=0), default=0, help="Dynamic shared memory of a block.")
@click.option("--define", "defines", metavar="NAME=VALUE", multiple=True, help="A macro; repeat for several.")
@click.option("--include", "includes", metavar="DIR", multiple=True, help="Where headers are; repeat for several.")
@click.option("--show", metavar="NAME", multiple=True, help="Print this array as the kernel leaves it.")
@click.option("--save", metavar="NAME=FILE.npy", multiple=True, help="Write this array as the kernel leaves it.")
@click.option("--op", "ops", metavar="NAME", multiple=True, help="Every case of one of our ops, or of all.")
@click.option("--variant", metavar="NAME", help="Of --op. Default: each one that can be simulated.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Of --op. Default: both.")
@click.option(
    "--budget",
    type=click.IntRange(1, 2**62),
    help="Thread instructions that a launch may take. Default: 5e9, where an endless loop ends within half a minute.",
)
@json_option
def sim_check(**arguments: Any) -> int:
    """Run CUDA C without a GPU and check it: bounds, unwritten values, races, cp.async, barriers, endless loops.

    An argument is [NAME=]VALUE. Arrays: TYPE[SHAPE], a .npy file, or @NAME, the array of another one. Behind
    TYPE[SHAPE] may follow :random, :random:N (integers below N), :empty (never written), :zeros, :ones, :arange,
    :NUMBER or :FILE.npy; the default is random for floats and zeros for integers. Numbers: 64, 1e-6, or with a type,
    f16:0.5; null is a null pointer. Types: f16 bf16 f32 f64, i8 to i64, u8 to u64.
    """
    from cupyllm.commands import sim_check as command

    return command.run(**arguments)


@cli.group(no_args_is_help=False, invoke_without_command=True)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure this GPU: `bench op NAME`.

    A peer's work is timed in the same run, in turns with ours, on random inputs that no cache holds.
    """
    if context.invoked_subcommand is None:
        raise click.UsageError("no benchmark was given, expected `bench op NAME`", context)


@bench.command("op")
@click.argument("name", metavar="NAME")
@click.option("--peer", type=click.Choice(BENCH_PEERS), help="Also time torch's, or cuBLAS's through cupyllm.")
@click.option(
    "--size",
    type=click.Choice(SIZES, case_sensitive=False),
    default="32b",
    show_default=True,
    help="Whose shapes: of this Qwen3.",
)
@click.option(
    "--m",
    "rows",
    type=Several(maximum=MAX_BENCH_ROWS),
    metavar="M,...",
    default="1,16,512,4096",
    show_default=True,
    help="Rows: tokens of a batch.",
)
@click.option(
    "--form",
    "forms",
    type=Several(BENCH_FORMS),
    metavar="FORM,...",
    default="forward",
    show_default=True,
    help=f"Of {', '.join(BENCH_FORMS)}.",
)
@click.option(
    "--projection",
    "projections",
    type=Several(BENCH_PROJECTIONS),
    metavar="NAME,...",
    default=",".join(BENCH_PROJECTIONS),
    show_default=True,
    help="Weights; kv is one of the two, qkv and gate-up are fused.",
)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--variant", metavar="NAME", help="Force a kernel variant (doctor --variants) instead of the chosen one.")
@click.option(
    "--format",
    "formats",
    type=Several(BENCH_FORMATS),
    metavar="FORMAT,...",
    default=(),
    help=f"Of quantized_linear's weights, of {', '.join(BENCH_FORMATS)}. Default: all.",
)
@json_option
@click.option("--out", metavar="FILE", help="Also write the JSON object here.")
def bench_op(**arguments: Any) -> int:
    """Time an op on this GPU: microseconds, TFLOP/s, GB/s, share of the read bandwidth, ratio to a peer.

    \b
    cupyllm bench op linear                                 what decoding and prefill of Qwen3-32B take
    cupyllm bench op linear --peer torch --m 4096 --form forward,dgrad,wgrad
    cupyllm bench op linear --peer cublas --size 8b --out linear.json
    cupyllm bench op linear --variant mma --m 512 --projection q,down
    cupyllm bench op quantized_linear --peer cublas --m 1,4096 --projection gate-up,down

    Exit status 1: a result differs from the peer's by more than rounding explains.
    """
    from cupyllm.commands import bench as command

    return command.run_op(**arguments)


@cli.command()
@options(model_option, backend_option)
@click.option("--out", metavar="DIR", default="cupyllm-verify", show_default=True, help="Where the report goes.")
@json_option
def verify(**arguments: Any) -> int:
    """Run every proof on this machine and write verify.md and verify.json."""
    from cupyllm.commands import verify as command

    return command.run(**arguments)


@cli.command()
@click.option("--variants", is_flag=True, help="List the kernel variants of every op.")
@click.option("--clean", is_flag=True, help="Remove cupyllm's caches and say how many bytes that freed.")
@json_option
def doctor(**arguments: Any) -> int:
    """Say what is installed, what is found, what is missing and the command that mends it."""
    from cupyllm.commands import doctor as command

    return command.run(**arguments)


def main() -> None:
    """Entry point of the console script."""
    cli.main()
