"""Write a safetensors checkpoint again in shards of another size, without loading it.

    python examples/reshard.py IN OUT 2GB

The configuration and the tokenizer come along. ``streamexport export IN OUT --max-shard-size 2GB`` does the same.
"""

import sys

from streamexport import export_sharded, plan_export

source, out_dir, max_shard_size = sys.argv[1:]
print(plan_export(source, max_shard_size))
print(export_sharded(source, out_dir, max_shard_size))
