# ruff: noqa: E501  (a row is a line)
"""The command lines of the four programs."""

from hostile_cases.case import Case, link, make_folder, mode

LONG = "x" * 300
FLAGS = "--config=tiny.py\n--workdir=run\n--config.steps=1\n"

TRAIN = [
  Case("flags/train nothing", "train", 2, ("flag --config is missing",)),
  Case("flags/train empty workdir", "train --config=tiny.py --workdir=", 2, ("--workdir",)),
  Case("flags/train stray word", "train $RUN steps=3", 2, ("argument 'steps=3' is not a flag",)),
  Case("flags/train after --", "train $RUN -- --config.seed=1", 2, ("--config.seed=1",)),
  Case("flags/train empty value", "train $RUN --config.seed=", 2, ("config key seed must be",)),
  Case("flags/train section as value", "train $RUN --config.algo=3", 2, ("algo",)),
  Case("flags/train two dots", "train $RUN --config..seed=3", 2, ("seed",)),
  Case("flags/train key below a value", "train $RUN --config.seed.x=3", 2, ("seed.x",)),
  Case("flags/train capital key", "train $RUN --config.Seed=3", 2, ("did you mean seed?",)),
  Case(
    "flags/train half a tuple",
    "train $RUN --config.reward.functions=\"('strict'\"",
    2,
    ("functions",),
  ),
  Case(
    "flags/train half a stop id", 'train $RUN --config.sampling.stop_ids="(1.5,)"', 2, ("stop_ids",)
  ),
  Case("flags/train empty preset", "train --config=tiny.py: --workdir=run", 2, ("no preset ''",)),
  Case(
    "flags/train capital preset",
    "train --config=tiny.py:GRPO --workdir=run",
    2,
    ("no preset 'GRPO'",),
  ),
  Case(
    "flags/train escape in a value",
    "train $RUN --config.data.task=$'\\e[2J'",
    2,
    ("data.task",),
    absent=("\x1b",),
  ),
]

WORKDIR = [
  Case("workdir/url", "train --config=tiny.py --workdir=file:///run", 2, ("file:///run",)),
  Case("workdir/dev null", "train --config=tiny.py --workdir=/dev/null", 2, ("/dev/null",)),
  Case("workdir/a file", "train --config=tiny.py --workdir=tiny.py", 2, ("tiny.py",)),
  Case("workdir/here", "train --config=tiny.py --workdir=.", 2, ("not empty",)),
  Case("workdir/a link to nothing", "train $RUN", 2, ("run",), setup=(link("run", "nowhere"),)),
  Case("workdir/one hidden file", "train $RUN", 2, ("not empty",), files={"run/.DS_Store": "x"}),
  Case(
    "workdir/unwritable",
    "train $RUN",
    (1, 2),
    ("run",),
    setup=(make_folder("run"), mode("run", 0o555)),
    as_user=True,
  ),
]

EXPORT = [
  Case("export/nothing", "export", 2, ("--out",)),
  Case("export/no source", "export --out=x", 2, ("--workdir",)),
  Case("export/negative step", "export --workdir=run --step=-1 --out=x", 2, ("step",), needs="run"),
  Case("export/step zero", "export --workdir=run --step=0 --out=x", 2, ("step 0",), needs="run"),
  Case("export/onto a file", "export --workdir=run --out=tiny.py", 2, ("tiny.py",), needs="run"),
  Case("export/dev null", "export --workdir=run --out=/dev/null", 2, ("/dev/null",), needs="run"),
  Case(
    "export/below proc",
    "export --workdir=run --out=/proc/x",
    2,
    ("/proc/x cannot be created: No such file or directory",),
    needs="run",
  ),
  Case(
    "export/onto a hidden file",
    "export --workdir=run --out=x",
    2,
    ("not an empty folder",),
    needs="run",
    files={"x/.keep": "1"},
  ),
  Case(
    "export/unwritable",
    "export --workdir=run --out=locked/x",
    (1, 2),
    ("locked",),
    needs="run",
    setup=(make_folder("locked"), mode("locked", 0o555)),
    as_user=True,
  ),
  Case(
    "export/lora without its base", "export --workdir=lora --out=x", 2, ("model",), needs="lora"
  ),
]

SAMPLE = [
  Case("sample/nothing", "sample", 2, ("--prompt",)),
  Case(
    "sample/question for another field",
    "sample --config=tiny.py --config.data.prompt='{prompt}' --question=1+1= --n=1",
    0,
    ("prompt of 4 tokens", "--- 1:"),
  ),
  Case(
    "sample/question for two fields",
    "sample --config=tiny.py --config.data.prompt='{body} {asked}' --question=1+1=",
    2,
    ("cannot fill 2 fields",),
  ),
  Case(
    "sample/question of a mixture with prompts",
    "sample --config=tiny.py --config.data.path='' --config.data.prompts=\"('{question}','Q{question}')\""
    " --config.data.mixture=\"('arithmetic','countdown')\" --question=1+1=",
    2,
    ("data.prompts", "a question alone has none"),
  ),
  Case(
    "sample/prompt without the chat template",
    "sample --config=tiny.py --config.model.path=model --config.data.chat=True --prompt=1+1= --n=1",
    0,
    ("prompt of 4 tokens", "without the chat template"),
    needs="model",
  ),
  Case(
    "sample/both prompts",
    "sample --workdir=run --prompt=1 --question=2",
    2,
    ("not both",),
    needs="run",
  ),
  Case("sample/n zero", "sample --workdir=run --prompt=1 --n=0", 2, ("--n is 0",), needs="run"),
  Case(
    "sample/negative seed",
    "sample --workdir=run --prompt=1 --seed=-1",
    0,
    ("--- 4: ",),
    needs="run",
  ),
  Case("sample/n a word", "sample --workdir=run --prompt=1 --n=many", 2, ("n",), needs="run"),
  Case(
    "sample/infinite temperature",
    "sample --workdir=run --prompt=1 --temperature=inf",
    2,
    ("--temperature",),
    needs="run",
  ),
  Case(
    "sample/max_tokens beyond the model",
    "sample --workdir=run --prompt=1 --max_tokens=99999999",
    2,
    ("positions",),
    needs="run",
  ),
  Case("sample/unknown character", "sample --workdir=run --prompt=apple", 2, ("'a'",), needs="run"),
  Case(
    "sample/control characters",
    "sample --workdir=run --prompt=$'1\\e[2J\\a'",
    2,
    ("not in the vocabulary",),
    absent=("\x1b", "\x07"),
    needs="run",
  ),
  Case(
    "sample/no checkpoint",
    "sample --workdir=run --prompt=1",
    2,
    ("holds no checkpoint",),
    needs="run",
    setup=(lambda folder: __import__("shutil").rmtree(folder / "run/checkpoints"),),
  ),
  Case("sample/no folder", "sample --workdir=none --prompt=1", 2, ("none",)),
  Case(
    "sample/a model folder as run",
    "sample --workdir=model --prompt=1",
    2,
    ("model/config.json",),
    needs="model",
  ),
]

EVALUATE = [
  Case("evaluate/nothing", "evaluate", 2, ("--workdir",)),
  Case(
    "evaluate/negative samples", "evaluate --workdir=run --samples=-1", 2, ("samples",), needs="run"
  ),
  Case(
    "evaluate/zero examples", "evaluate --workdir=run --examples=0", 2, ("examples",), needs="run"
  ),
  Case(
    "evaluate/run and config",
    "evaluate --workdir=run --config=tiny.py",
    2,
    ("either",),
    needs="run",
  ),
  Case(
    "evaluate/key without config",
    "evaluate --workdir=run --config.eval.batch=4",
    2,
    ("config",),
    needs="run",
  ),
  Case(
    "evaluate/devices do not divide the batch",
    "evaluate --workdir=run",
    2,
    ("eval.batch",),
    needs="run",
    env={"JAX_NUM_CPU_DEVICES": "3"},
  ),
]

CASES = [*TRAIN, *WORKDIR, *EXPORT, *SAMPLE, *EVALUATE]
