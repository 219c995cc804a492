"""The text of the convergence study: build it out of packages, pack it, and unpack it elsewhere.

    python -m dev.convergence.corpus build   --data DIR     download, read, tokenize; writes dev/convergence/corpus.json
    python -m dev.convergence.corpus pack    --data DIR     DIR/shards/0, 1, …: at most 53 MiB each
    python -m dev.convergence.corpus unpack  --data DIR SHARD …

`corpus.toml` names the packages. A file of text counts once, by its hash, which also says whether it is held out. DIR
has tokens.bin (uint16, held-out tokens last) and tokenizer.json; their hashes are in corpus.json.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import tokenizers

from dev.convergence.packages import Package, fetch_package, read_manifest, read_texts
from dev.convergence.shards import pack, unpack
from dev.convergence.tokens import VOCAB, hash_file, train_tokenizer, write_tokens

CORPUS = Path(__file__).with_name("corpus.json")


def read_package(package: Package, folder: Path) -> dict[str, str]:
    """Download a package, and return its texts by the hashes of their files."""
    return read_texts(package, fetch_package(package, folder))


def build(data: Path, processes: int) -> None:
    """Download, read and tokenize the packages, and describe the result in CORPUS."""
    packages, texts, rows = read_manifest(), {}, []
    with ProcessPoolExecutor(processes) as pool:
        for package, found in zip(
            packages, pool.map(partial(read_package, folder=data / "packages"), packages), strict=True
        ):
            new = {key: text for key, text in found.items() if key not in texts}
            texts.update(new)
            size = sum(map(len, new.values()))
            rows.append({"name": package.name, "version": package.version, "files": len(new), "characters": size})
            print(f"{package.name} {package.version}: {len(new)} files, {size:,} characters", flush=True)
    print(f"{len(texts)} files, {sum(row['characters'] for row in rows):,} characters", flush=True)
    tokenizer = train_tokenizer(texts)
    tokenizer.save(str(data / "tokenizer.json"))
    trained, held_out = write_tokens(texts, tokenizer, data / "tokens.bin")
    about = {
        "tokens": trained,
        "held_out_tokens": held_out,
        "vocab": VOCAB,
        "sha256": {name: hash_file(data / name) for name in ("tokens.bin", "tokenizer.json")},
        "tokenizers": tokenizers.__version__,
        "packages": rows,
    }
    CORPUS.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    print(f"{trained:,} tokens to train on, {held_out:,} held out")


def main() -> None:
    """Run the verb that was given."""
    parser = argparse.ArgumentParser(prog="python -m dev.convergence.corpus", description=__doc__.split("\n")[0])
    parser.add_argument("verb", choices=("build", "pack", "unpack"))
    parser.add_argument("shards", nargs="*", type=Path, help="folders to unpack")
    parser.add_argument("--data", type=Path, required=True, help="folder of the data set")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_intermixed_args()
    if args.verb == "build":
        build(args.data, args.processes)
    elif args.verb == "pack":
        for folder in pack(args.data, args.data / "shards", args.processes):
            print(folder, f"{sum(path.stat().st_size for path in folder.iterdir()) / 2**20:.1f} MiB")
    else:
        missing = unpack(args.shards, args.data, CORPUS)
        print(f"missing still: {', '.join(missing)}" if missing else f"{args.data} is whole, and has the right hashes")


if __name__ == "__main__":
    main()
