"""How the trainer's weights reach SGLang servers.

    channel = await open_channel(urls, session, folder=run_folder / "weights", say=print)
    done = await channel.publish(step, ModelWeights(model))     # pauses, loads, checks, sets the version, resumes
    done.good, done.failed                                      # URLs; URL -> what went wrong
    channel.versions[url]                                       # the step a server holds, None: not to be sampled from
    await channel.sleep(("weights", "kv_cache"))                # memory for the trainer; `publish` wakes the servers
    await channel.close()

Where only an adapter is trained: `LoraChannel`, see `lora.py`. `Sender` opens whichever a `WeightRequest` needs; a
trainer of many processes has a `Publisher` in each.

The invariant: a server's version is set when the whole update has landed, and only then may it generate again. Whatever
fails on the way leaves it paused and without a version, until a later update succeeds as a whole.
"""

from agentrl.weights.channel import Published, WeightChannel
from agentrl.weights.choose import open_channel
from agentrl.weights.lora import LoraChannel
from agentrl.weights.publisher import Publisher
from agentrl.weights.request import WeightRequest, WeightResult, What
from agentrl.weights.sender import Sender
from agentrl.weights.server import PauseMode, WeightServer, WeightUpdateError
from agentrl.weights.source import ModelWeights

__all__ = [
    "LoraChannel",
    "ModelWeights",
    "PauseMode",
    "Published",
    "Publisher",
    "Sender",
    "WeightChannel",
    "WeightRequest",
    "WeightResult",
    "WeightServer",
    "WeightUpdateError",
    "What",
    "open_channel",
]
