"""Convert a Llama-type model with its own byte-level tokenizer to GGUF, with llama.cpp's converter.

python benchmarks/peers/llama_cpp_convert.py LLAMA_CPP build/target-134m build/target.gguf

LLAMA_CPP is llama.cpp's source folder. The converter refuses byte-level tokenizers that it does not know, so this one
is declared to be GPT-2's: the tokens are right, but llama.cpp would split text into them wrongly, so
`llama_cpp_peer.py` sends token ids instead of text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--dtype", choices=("bf16", "f16", "f32"), default="bf16")
    args = parser.parse_args()
    if not (args.llama_cpp / "convert_hf_to_gguf.py").is_file():
        parser.error(f"there is no convert_hf_to_gguf.py in {args.llama_cpp}: give llama.cpp's source folder.")
    sys.path.insert(0, str(args.llama_cpp))
    converter = taught()
    sys.argv = ["convert_hf_to_gguf.py", str(args.model), "--outfile", str(args.gguf), "--outtype", args.dtype]
    converter.main()


def taught() -> Any:
    """Import llama.cpp's converter, and patch it to accept any byte-level tokenizer."""
    import convert_hf_to_gguf  # type: ignore[import-not-found]
    from conversion import base, llama  # type: ignore[import-not-found]

    base.TextModel.get_vocab_base_pre = lambda model, tokenizer: "gpt-2"
    llama.LlamaModel.set_vocab = lambda model: model._set_vocab_gpt2()
    return convert_hf_to_gguf


if __name__ == "__main__":
    main()
