"""Three peers with layers 0:10, 10:20 and 20:30, each with its own folder and key, each told of one other; the same
question at all three endpoints. Started by scripts/demo; everything it made is gone when it ends, Ctrl-C included.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence

from peers import PeerFailure, Streamed, ask, chain, even_spans, fetch_model, scratch_folder

QUESTION = "Why is the sky blue? Answer in two sentences."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--max-tokens", type=int, default=80)
    options = parser.parse_args()
    try:
        sys.exit(demo(options.question, options.max_tokens))
    except PeerFailure as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def demo(question: str, max_tokens: int) -> int:
    with scratch_folder() as folder:
        print("Getting the model (98 MB, once) ...", flush=True)
        fetch_model(folder / "first")
        print("Starting three peers: a third of the layers each, its own key, told of one other ...", flush=True)
        with chain(folder, even_spans(3), f"demo-{secrets.token_hex(4)}", "--threads", "1") as peers:
            for peer in peers:
                print(f"  {peer.peer_id[:8]}  layers {peer.ready['layers']:>5}  {peer.api}")
            print(f"\nAsking all three, one after the other: {question}\n", flush=True)
            body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": max_tokens}
            answers = []
            for peer in peers:
                answers.append(ask(peer.api, "/chat/completions", body))
                show(peer.peer_id, answers[-1])
    return verdict(answers)


def verdict(answers: Sequence[Streamed]) -> int:
    """Answers are promised to agree on the same route, numclass and chunking; the last is every head's default here."""
    same_way = len({(answer.route, answer.numclass) for answer in answers}) == 1
    agree = len({answer.text for answer in answers}) == 1
    print(f"Route and numclass {'are the same at all three' if same_way else 'DIFFER'}; all chunk prompts alike.")
    print("The three answers are the same, letter by letter." if agree else "THE ANSWERS DIFFER.")
    return 0 if agree and same_way else 1


def show(peer_id: str, answer: Streamed) -> None:
    print(f"at {peer_id[:8]}, over the route {answer.route} ({answer.numclass}):")
    print("  " + answer.text.strip().replace("\n", "\n  "))
    print(f"  ({answer.completion_tokens} tokens, {1 / answer.tpot_s:.1f} tokens/s)\n", flush=True)


if __name__ == "__main__":
    main()
