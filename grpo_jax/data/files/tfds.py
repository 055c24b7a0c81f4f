"""Rows of TensorFlow Datasets (TFDS), read without TensorFlow."""

from pathlib import Path
from typing import Any

from grpo_jax.data.files.download import check_connection
from grpo_jax.data.files.rows import plain
from grpo_jax.data.images.of_prompts import IMAGE_COLUMNS
from grpo_jax.settings import ConfigError


class Prepared:
  """The rows of a split in a folder that TFDS prepared with file_format="array_record"."""

  def __init__(self, folder: Path, split: str) -> None:
    """Opens the split. A split that the folder lacks has no rows.

    Raises:
      ConfigError: TFDS cannot read the folder, or is not installed.
    """
    try:
      import tensorflow_datasets as tfds  # imported here because the import is slow

      builder = tfds.builder_from_directory(folder)
      self._splits = list(builder.info.splits)
      self._source = builder.as_data_source(split) if split in self._splits else []
    except Exception as error:  # TFDS raises many types for a damaged folder
      raise ConfigError(
        f"data.path: TensorFlow Datasets cannot read {folder} ({type(error).__name__}:"
        f" {' '.join(str(error).split()):.160}); prepare it with file_format='array_record'"
      ) from None
    self._folder, self._split = folder, split

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> Any:
    return {
      name: plain(value, self.where(index), keeps_bytes=name in IMAGE_COLUMNS)
      for name, value in self._source[index].items()
    }

  def where(self, index: int) -> str:
    """The folder, the split and the number of a row, for error messages."""
    return f"{self._folder} {self._split} example {index}"

  def columns(self) -> list[str]:
    """The names of the columns, which all examples have."""
    return list(self[0])


def gsm8k(split: str) -> list[Any]:
  """Reads the rows of GSM8K. TFDS downloads the data set if it is not prepared.

  Raises:
    ConfigError: TFDS cannot provide the data set.
  """
  try:
    # Imported here because the import is slow and no other task needs the package. The second
    # import also registers the data set, because TFDS needs TensorFlow to find it by name.
    import tensorflow_datasets as tfds
    from tensorflow_datasets.text.gsm8k import gsm8k as module

    builder = module.Gsm8k(file_format="array_record")
    if not builder.is_prepared():
      # Without a network, TFDS would retry for minutes.
      check_connection(module._URLS[split], "GSM8K", builder.data_dir)
    return [plain(row, "its row") for row in tfds.data_source("gsm8k", split=split)]
  except Exception as error:
    # The package, the network or disk space may be missing, or the folder damaged. The exceptions
    # differ, but the remedy is the same.
    raise ConfigError(
      "data.task=gsm8k: TensorFlow Datasets could not provide it"
      f" ({type(error).__name__}: {' '.join(str(error).split()):.160}); pass"
      " --config.data.path=FOLDER with train.jsonl and test.jsonl, or prepare it where there is a"
      ' network: python -c "import tensorflow_datasets as tfds, tensorflow_datasets.text.gsm8k;'
      " tfds.data_source('gsm8k')\""
    ) from error
