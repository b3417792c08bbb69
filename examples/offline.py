"""A model in this process: answers, a conversation, sleep and wake. No server.

    python examples/offline.py [MODEL]

MODEL: a folder, a GGUF file, a Hugging Face repo id or a demo name (default: smollm2).
"""

import sys

from hotrack import LLM, SamplingParams

MIB = 2**20


def main(model: str) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=24)
    with LLM(model, max_model_len=1024, kv_cache_memory_bytes=64 * MIB) as llm:
        for result in llm.generate(["The capital of France is", "Two plus two is"], greedy):
            print(f"{result.prompt!r} -> {result.outputs[0].text!r}")

        question = [{"role": "user", "content": "Name a planet."}]
        before = llm.chat(question, greedy)[0].outputs[0]
        print("before sleep:", before.text)

        slept = llm.sleep(level=1)  # weights stay on the host, device memory goes back
        print(f"asleep: {slept['rss_before_bytes'] // MIB} -> {slept['rss_after_bytes'] // MIB} MiB resident")
        woken = llm.wake_up()
        print(f"awake again in {woken['total_ms']:.0f} ms")

        after = llm.chat(question, greedy)[0].outputs[0]
        print("same tokens after the sleep:", after.token_ids == before.token_ids)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
