"""How the trainer's weights reach servers.

    channel = await open_channel(urls, session, folder=run_folder / "weights", say=print)
    done = await channel.publish(step, ModelWeights(model))     # pauses, loads, verifies, sets the version, resumes
    done.good, done.failed                                      # URLs; URL -> what went wrong
    channel.versions[url]                                       # the step a server holds, None: not to be sampled from
    await channel.sleep(("weights", "kv_cache"))                # memory for the trainer; `publish` wakes the servers
    await channel.close()

Where only an adapter is trained: `LoraChannel`. `Sender` opens whichever of the two a `WeightRequest` needs; a trainer
of many processes has a `Publisher` in each.

The invariant: a server's version is set when the whole update has landed, and only then may it generate again. Whatever
fails on the way leaves it paused and without a version, until a later update succeeds as a whole.
"""
