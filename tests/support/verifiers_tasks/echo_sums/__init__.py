"""A taskset in the form of verifiers 0.4, with a harness of its own that holds the conversation in its own process."""

import random

import httpx
from verifiers import v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in (trace.last_reply or ""))

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") < 200)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class SumsConfig(vf.TasksetConfig):
    count: int = 40
    seed: int = 0


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        rng = random.Random(self.config.seed)
        for _ in range(self.config.count):
            a, b = rng.randint(2, 9), rng.randint(2, 9)
            yield SumTask(SumData(prompt=f"Tom has {a} pens and buys {b} more. How many pens?", answer=a + b))


class LoopConfig(vf.HarnessConfig):
    pass


class Loop(vf.Harness[LoopConfig]):
    """One call of the model, made in this process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [{"role": m.role, "content": m.content} for m in prompt or []]
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": messages},
            )
        code = 0 if answer.status_code == 200 else 1
        return vf.ProgramResult(exit_code=code, stdout="", stderr=answer.text if code else "")


__all__ = ["Loop", "Sums"]
