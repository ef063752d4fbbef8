"""Which words does Python's own standard library use most? Counted by Zephyr, on a cluster of this machine.

pip install 'fluster[local,zephyr]'
"""

import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from zephyr.dataset import Dataset

from fluster import LocalCluster
from fluster.integrations.zephyr import FlusterBackend

SHARDS = 4


def words_of(path: str) -> Counter[str]:
    return Counter(re.findall(r"[a-z_]+", Path(path).read_text(encoding="utf-8", errors="replace")))


def total(word: str, found: Iterator[tuple[str, int]]) -> tuple[str, int]:
    return word, sum(uses for _, uses in found)


def main() -> None:
    files = sorted(str(path) for path in Path(sysconfig.get_path("stdlib")).glob("*.py"))
    words = (
        Dataset.from_list(files)
        .reshard(SHARDS)
        .flat_map(lambda path: words_of(path).items())
        .group_by(key=lambda each: each[0], reducer=total, num_output_shards=SHARDS)
    )
    with LocalCluster() as cluster:
        counts = dict(FlusterBackend(cluster, max_parallelism=2).execute(words))
    for word, uses in sorted(counts.items(), key=lambda each: (-each[1], each[0]))[:5]:
        print(f"{word:6} {uses:,}")
    assert counts == sum((words_of(path) for path in files), Counter())
    print(f"A single process counts the same {len(counts):,} words in {len(files)} files.")


if __name__ == "__main__":
    main()
