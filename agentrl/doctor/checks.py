"""The checks, in their order: what others rest on comes first."""

from agentrl.doctor import computing, machine, running, sampling
from agentrl.doctor.check import Check

CHECKS = (
    Check("devices", "devices, their memory, peer access", machine.devices, "model.device, cluster.gpus"),
    Check("versions", "packages, driver, the server's environment", machine.versions, "package agentrl"),
    Check("arithmetic", "matrix products, memory bandwidth", machine.arithmetic, "model.device, package torch"),
    Check("packing", "packed rows against separate sequences", computing.packing, "model.path, package transformers"),
    Check("attention", "every way to attend on this device", computing.attention, "package torch (and its triton)"),
    Check("bfloat16", "log-probs in half precision", computing.bfloat16, "model.dtype, model.compute: not bfloat16"),
    Check("lora", "an adapter in trainer and engine", computing.lora, "model.lora"),
    Check("engine", "starts and samples", sampling.engine, "engine.args", 1200.0),
    Check("parity", "greedy tokens of engine and trainer", sampling.parity, "engine.args.flags.dtype, model.dtype",
          1200.0, ("engine",)),
    Check("weights", "an update; wrong weights are noticed", sampling.weights, "engine.args.weights", 1200.0,
          ("engine",)),
    Check("sleep", "memory given back, and taken again", sampling.sleep, "engine.sleep", 1200.0, ("engine",)),
    Check("transports", "every other way of an update", sampling.transports, "engine.args.weights", 3600.0,
          ("engine",)),
    Check("update", "an update of the recipe's size", running.update, "train.micro_batch_tokens, model.checkpointing",
          1200.0),
    Check("checkpoint", "written, killed, resumed", running.checkpoint, "output (its disk)", 300.0),
    Check("workers", "two workers under Ray", running.workers, "package ray, cluster.workers", 300.0),
    Check("sandbox", "code of the model, confined", machine.sandbox, "the system package bubblewrap, or tools.python"),
    Check("step", "one whole step of the recipe", running.step, "the key that the line names", 1800.0, ("engine",)),
    Check("estimate", "time and memory of the whole run", running.estimate, "model, train", needs=("step",)),
)  # fmt: skip
