"""The files of a tokenizer with one id per character, for this package and for `transformers`.

For some models `transformers` reads only the vocabulary, the merges and the added tokens from
tokenizer.json, and builds the rest itself. For a Qwen2 model it builds a byte-level BPE, with a
pattern that splits texts and with Unicode normalization (NFC). So the files describe such a BPE.
The form of a token keeps its character one id, in encoding and in decoding:

* An ASCII character is one byte. Its token is the symbol of this byte, such as Ġ for a space.
* A character between ¡ and Ń may itself be the symbol of a byte, so its token cannot be its text: é
  would be decoded as the byte 0xE9. Its token is a merge of the symbols of its two bytes. These
  symbols have ids after those of all characters. No text of the alphabet has these ids.
* Any other character is an added token. No normalization and no pattern changes it.
"""

from collections.abc import Sequence
import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

PAD, EOS = "<pad>", "<eos>"
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_SYMBOLS = frozenset(pre_tokenizers.ByteLevel.alphabet())


def make(alphabet: Sequence[str]) -> dict[str, bytes]:
  """Makes the files. Returns their contents, keyed by file name.

  Args:
    alphabet: The distinct characters. Their ids are 2, 3, ... in this order.
  """
  engine = _engine(alphabet)
  special = {"eos_token": EOS, "pad_token": PAD}
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    **special,
    "unk_token": None,  # else transformers adds <|endoftext|> to the tokenizer of a Qwen2 model
  }
  return {
    "tokenizer.json": engine.to_str(pretty=True).encode(),
    "tokenizer_config.json": json.dumps(config, indent=2).encode(),
    "special_tokens_map.json": json.dumps(special, indent=2).encode(),
  }


def _engine(alphabet: Sequence[str]) -> tokenizers.Tokenizer:
  """A tokenizer with a token for each character, as the module's docstring describes."""
  tokens = [PAD, EOS]
  merges = []
  added = []
  for character in alphabet:
    symbols = _byte_symbols(character)
    if len(symbols) == 1:  # an ASCII character
      tokens.append(symbols)
    elif character in _SYMBOLS:  # its text would be decoded as another byte
      tokens.append(symbols)
      merges.append((symbols[0], symbols[1]))
    else:
      tokens.append(character)
      added.append(tokenizers.AddedToken(character, normalized=False))
  tokens += sorted({symbol for merge in merges for symbol in merge})
  vocabulary = {token: i for i, token in enumerate(tokens)}
  engine = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
  engine.pre_tokenizer = _BYTES
  engine.decoder = decoders.ByteLevel()
  engine.add_special_tokens([PAD, EOS])
  engine.add_tokens(added)
  return engine


def _byte_symbols(character: str) -> str:
  """The symbols that stand for the bytes of a character in UTF-8."""
  return "".join(piece for piece, _ in _BYTES.pre_tokenize_str(character))
