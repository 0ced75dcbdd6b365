"""Drafting on a GPU at the real sizes, with random weights and a random draft head.

    python benchmarks/gpu_drafting.py [--mix q4_k_xl] [--layers 48] [--users 1,2,4,8]
        [--chances 0,0.65,0.9] [--tokens 64] [--parts steps,speed] [--save FILE]

steps: a launch of 1 to 8 rows, drawing 1 to 7 drafts, the acceptance at which drafts of each length pay.
speed: rate of decoding over that without drafts, step by step in turn (drafting_turns.py).

Random weights cannot be guessed, so whether a draft stands is FORCED, for timing alone: the head computes
all that it would, then the reply's own next token, known from a reply without drafts, is put before its
choice at a share of the places (--chances; 0: it never stands, where drafting can only lose; 0.65 is what
people report of the real head's first draft, 0.9 stands for text that repeats itself). Nothing is drafted
from the text itself. Replies with and without drafts are compared; the program fails where they differ.

--model PATH times a model from files, on a CPU with --device cpu; that is also how to try this program.
It needs torch, triton, numpy, tokenizers and jinja2 alone; with PYTHONPATH=src no civetta is installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from drafting_steps import settle, step_report
from drafting_turns import step_loop, take_turns

from civetta.decode.lookup import TextIndex
from civetta.engine.calibrate import calibrate
from civetta.engine.protocol import GenerateRequest
from civetta.engine.speculation import Drafting
from civetta.kernels.select import resolve_device, select
from civetta.model.bind_mtp import find_head
from civetta.model.build import TableOptions, build_trunk, check_checkpoint
from civetta.model.embedded import embedded_model_path
from civetta.model.mtp import MtpHead
from civetta.ngram.placement import StoreOptions
from civetta.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from civetta.model.config import ModelConfig
    from civetta.model.gpu.weights import GpuWeights
    from civetta.model.mtp import Chain
    from civetta.model.trunk import Trunk
    from civetta.model.weights import MtpWeights
    from civetta.state.session import Session

PROMPT = 100


class ForcedHead:
    """A head whose drafts are the texts' own next tokens at a share `chance` of the places.

    It computes as the real one does; only what is drawn from is changed.
    """

    def __init__(self, head: MtpHead, texts: Sequence[Sequence[int]], chance: float) -> None:
        self._head, self._chance = head, chance
        self._texts = {tuple(text[:PROMPT]): text for text in texts}
        self._places: dict[int, int] = {}

    def begin(
        self, sessions: Sequence[Session], next_ids: Sequence[int]
    ) -> tuple[torch.Tensor, Chain]:
        """As `MtpHead.begin`."""
        logits_BV, chain = self._head.begin(sessions, next_ids)
        return self._forced(logits_BV, chain), chain

    def extend(self, chain: Chain, ids: Sequence[int]) -> tuple[torch.Tensor, Chain]:
        """As `MtpHead.extend`."""
        logits_BV, chain = self._head.extend(chain, ids)
        return self._forced(logits_BV, chain), chain

    def _forced(self, logits_BV: torch.Tensor, chain: Chain) -> torch.Tensor:
        vocab = logits_BV.shape[1]
        wanted = []
        for session in chain.sessions:
            text = self._texts[tuple(session.ids[:PROMPT])]
            place = session.position + chain.steps
            right = text[place] if place < len(text) else 0
            wrong = (place * 2654435761) % 4294967296 >= self._chance * 4294967296
            wanted.append((right + wrong) % vocab)
        logits_BV = logits_BV.clone()  # the real one is of inference mode
        rows_B = torch.arange(len(wanted), device=logits_BV.device)
        logits_BV[rows_B, torch.tensor(wanted, device=logits_BV.device)] = 1e4
        return logits_BV


def speed(plain: Trunk, drafting: Trunk, args: argparse.Namespace) -> dict[str, Any]:
    """Ratios by users and chance."""
    TextIndex.continuation = lambda *_: ((), 0)  # type: ignore[method-assign]
    assert drafting.head is not None
    launches, steps = calibrate(drafting)
    context, vocab = PROMPT + args.tokens + 64, plain.config.vocab
    room = {"context": context, "clock": time.perf_counter}
    report: dict[str, Any] = {}
    for users in args.users:
        batch = [_request(i, vocab, args.tokens) for i in range(users)]
        off = step_loop(plain, None, users=users, **room)
        texts = _texts(off, batch)
        for chance in args.chances:
            how = Drafting(
                mode="mtp",
                most=7,
                head=ForcedHead(drafting.head, texts, chance),  # type: ignore[arg-type]
                launches=launches,
                steps=steps,
            )
            on = step_loop(drafting, how, users=users, **room)
            first = take_turns((off, on), users, batch, stretch=8 * users)
            found = take_turns((off, on), users, batch * args.rounds, stretch=8 * users)
            depths = [
                (a - c, b - d)
                for (a, b), (c, d) in zip(
                    found.stats.draft_depths, first.stats.draft_depths, strict=True
                )
            ]
            off_s, on_s = (float(s) for s in found.seconds_N2.sum(axis=0))
            name = f"c={users}, forced {chance}"
            report[name] = {
                "off_tokens_s": round(found.tokens / off_s, 1),
                "drafting_tokens_s": round(found.tokens / on_s, 1),
                "ratio": round(found.ratio, 3),
                "ratio_95": [round(x, 3) for x in found.interval()],
                "ratio_at_first": round(first.ratio, 3),  # with graphs still to be captured
                "drafted_by_depth": [drafted for drafted, _ in depths],
                "accepted_by_depth": [accepted for _, accepted in depths],
            }
            print(name, report[name], file=sys.stderr, flush=True)
    return report


def _texts(off: Any, batch: Sequence[GenerateRequest]) -> list[list[int]]:
    """Prompts and replies without drafts: computed once on one loop alone."""
    found = take_turns((off, off), len(batch), batch)
    return [[*one.prompt_ids, *ids] for one, ids in zip(batch, found.replies, strict=True)]


def _request(number: int, vocab: int, tokens: int) -> GenerateRequest:
    ids = [(7919 * (i + 1) * (number + 1) + 13 * number) % (vocab - 8) for i in range(PROMPT)]
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_ids=tuple(ids),
        sampling=SamplingParams(temperature=0),
        max_tokens=tokens,
        ignore_eos=True,
    )


# ---- models -----------------------------------------------------------------------------------------


def from_files(args: argparse.Namespace) -> tuple[Trunk, Trunk]:
    """The model without and with its draft head; on a GPU both are loaded."""
    checked = check_checkpoint(Path(args.model) if args.model else embedded_model_path())
    found = find_head(checked.checkpoint, checked.config, None)
    if found is None:
        sys.exit(f"{checked.checkpoint.path} has no draft head, and none lies beside it")
    device = resolve_device(args.device)
    torch.set_num_threads(1)
    plain, drafting = (
        build_trunk(
            checked,
            dtype=torch.float32 if device.type == "cpu" else torch.float16,
            ops=select(args.device, 1),
            head=head,
            table=TableOptions(store=StoreOptions(placement="ram", reader="auto")),
            device=device,
        )
        for head in (None, found)
    )
    return plain, drafting


def random_trunks(args: argparse.Namespace, folder: Path) -> tuple[Trunk, Trunk]:
    """Real sizes on the GPU, without a head and with a random one; the weights are shared."""
    from civetta.kernels.gpu import gpu_ops
    from civetta.model.gpu.random import flash_next_config, random_weights, write_random_table
    from civetta.model.gpu.trunk import GpuTrunk
    from civetta.ngram.feed import RowFeed
    from civetta.ngram.placement import StoreOptions, open_store

    device, dtype, ops = torch.device(args.device), torch.float16, gpu_ops()
    config = flash_next_config(args.layers, args.ngram_base)
    assert config.ple is not None
    layout = write_random_table(config, args.mix, folder / "table")
    weights = random_weights(config, args.mix, device)
    store = open_store(layout, StoreOptions(placement="ram"), device=device, other_bytes=0)
    feed = RowFeed(config.ple.hash, store, dtype=dtype, device=device)
    head = MtpHead(config, random_head(config, weights, device), ops, dtype, device=device)
    plain, drafting = (
        GpuTrunk(config, None, weights, ops, dtype, feed, one, device=device)
        for one in (None, head)
    )
    return plain, drafting


def random_head(config: ModelConfig, trunk: GpuWeights, device: torch.device) -> MtpWeights:
    """A draft head of Q8_0 matrices that shares the trunk's output matrix."""
    from civetta.kernels.packed import PackedExperts, PackedHyper
    from civetta.kernels.random_planes import random_packed
    from civetta.model.weights import BlockWeights, MoeWeights, MtpWeights, QsaWeights

    c, generator = config, torch.Generator(device=device).manual_seed(1)

    def matrix(rows: int, cols: int, experts: int = 1, name: str = "Q8_0") -> Any:
        return random_packed(name, rows, cols, generator, experts=experts)

    def ones(*size: int) -> torch.Tensor:
        return torch.ones(*size, device=device)

    def hyper(*, ends: bool = False) -> PackedHyper:
        inject = torch.randn(c.streams, c.wide, generator=generator, device=device) * c.wide**-0.5
        return PackedHyper(
            gain_SD=ones(c.streams, c.hidden),
            down=matrix(c.stream_rank, c.wide),
            up=matrix(c.wide, c.stream_rank),
            inject=None if ends else inject,
        )

    mixer = QsaWeights(
        q=matrix(2 * c.heads * c.head_dim, c.hidden),
        k=matrix(c.kv_heads * c.head_dim, c.hidden),
        v=matrix(c.kv_heads * c.head_dim, c.hidden),
        out=matrix(c.hidden, c.heads * c.head_dim),
        q_norm_A=ones(c.head_dim),
        k_norm_A=ones(c.head_dim),
        index_q=matrix(c.index_heads * c.index_dim, c.hidden),
        index_k=matrix(c.index_dim, c.hidden),
        index_q_norm_X=ones(c.index_dim),
        index_k_norm_X=ones(c.index_dim),
    )
    experts: Any = PackedExperts(
        gate=matrix(c.expert_width, c.hidden, c.experts),
        up=matrix(c.expert_width, c.hidden, c.experts),
        down=matrix(c.hidden, c.expert_width, c.experts),
    )
    mixture = MoeWeights(
        router=matrix(c.experts, c.hidden, name="F32"),
        experts=experts,
        shared_gate=matrix(c.shared_width, c.hidden),
        shared_up=matrix(c.shared_width, c.hidden),
        shared_down=matrix(c.hidden, c.shared_width),
        shared_mix=matrix(1, c.hidden, name="F32"),
    )
    block: Any = BlockWeights(
        attn_hyper=hyper(),  # type: ignore[arg-type]
        mixer=mixer,
        mlp_hyper=hyper(),  # type: ignore[arg-type]
        moe=mixture,
        ple=None,
    )
    embed = torch.randn(c.vocab, c.hidden, generator=generator, device=device, dtype=torch.bfloat16)
    last: Any = hyper(ends=True)
    output: Any = trunk.head
    return MtpWeights(
        embed=embed.mul_(c.hidden**-0.5),
        embed_norm_D=ones(c.hidden),
        hidden_norm_SD=ones(c.streams, c.hidden),
        embed_in=matrix(c.hidden, c.hidden),
        hidden_in=matrix(c.hidden, c.hidden),
        block=block,
        mixer=last,
        head=output,
    )


def compiled(trunk: Trunk) -> int:
    """Compile what a prefill, launches of 1 to 8 rows, a catch-up and two draft steps need."""
    from gpu_ahead import compile_ahead

    def once() -> None:
        store = trunk.store(sessions=1, context_tokens=PROMPT + 64)
        session = store.open()
        trunk.forward(session, list(range(PROMPT)), "last")
        for rows in (1, 2, 4, 8):
            trunk.forward(session, [1] * rows, "all")
        assert trunk.head is not None
        session.reserve(4)
        _, chain = trunk.head.begin([session], [1])
        trunk.head.extend(chain, [1])
        session.close()

    return compile_ahead(once)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model from files; '' for the embedded one")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mix", default="q4_k_xl")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--ngram-base", type=int, default=250_000)
    parser.add_argument("--users", type=_list(int), default=[1, 2, 4, 8])
    parser.add_argument("--chances", type=_list(float), default=[0.0, 0.65, 0.9])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--parts", type=_list(str), default=["steps", "speed"])
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"args": {k: str(v) for k, v in vars(args).items()}}
    began_s = time.perf_counter()

    def told(what: str) -> None:
        print(f"{what} after {time.perf_counter() - began_s:.1f} s", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            plain, drafting = random_trunks(args, Path(folder))
            told("weights made")
            told(f"{compiled(drafting)} launches compiled")
        else:
            plain, drafting = from_files(args)
        if "steps" in args.parts:
            report["steps"] = step_report(drafting, time.perf_counter, args.repeats)
            print(report["steps"], file=sys.stderr, flush=True)
            told("steps timed")
        if "speed" in args.parts:
            report["speed"] = speed(plain, drafting, args)
            told("speed timed")
        settle(drafting)
        drafting.close()
    text = json.dumps(report, indent=1)
    print(text)
    if args.save:
        args.save.write_text(text + "\n", encoding="utf-8")


def _list(kind: Any) -> Any:
    return lambda raw: [kind(word) for word in raw.split(",")]


if __name__ == "__main__":
    main()
