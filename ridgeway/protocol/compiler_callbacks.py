"""Programs that call Python of their own while XLA partitions them: the questions, as they go from a compiler over the
head to the controller, and the answers.

jax lowers these calls to custom calls whose configuration is an address in the process that lowered them (the number
of an object for `custom_partitioning`, two pointers for `inspect_array_sharding`).  Elsewhere it is only a name for the
Python in that process, by which a compiler asks for what it must know.  Question and answer are MessagePack lists::

    ["inspect", key, sharding]                              -> ["answer"]
    ["propagate", key, sharding, shape]                     -> ["answer", sharding]
    ["infer", key, shapes, shardings, shape of the result]  -> ["answer", sharding]
    ["partition", key, shapes, shardings, shape of the result, its sharding]
                                                            -> ["answer", module, shardings, sharding of the result]

Shapes are texts as XLA writes them (``f32[8,4]{1,0}``), shardings serialized `xla.OpSharding`, a module is MLIR
bytecode.
"""

INSPECT = "InspectSharding"
PARTITION = "CustomSPMDPartitioning"
MAKERS = {INSPECT: "jax.debug.inspect_array_sharding", PARTITION: "jax.experimental.custom_partitioning"}
"""Target of a custom call -> what makes it."""


def may_ask(artifact: bytes) -> bool:
    """Whether a StableHLO artifact may have such calls. Its meaning then depends on the process that sent it."""
    return any(target.encode() in artifact for target in MAKERS)
