# ruff: noqa: E501  (a row is a line)
"""The command lines of the four programs."""

from hostile_cases.case import Case, link, make_folder, mode, write

LONG = "x" * 300
FLAGS = "--config=tiny.py\n--workdir=run\n--config.steps=1\n"

TRAIN = [
  Case("flags/train nothing", "train", 2, ("flag --config is missing",)),
  Case("flags/train no workdir", "train --config=tiny.py", 2, ("flag --workdir is missing",)),
  Case("flags/train empty workdir", "train --config=tiny.py --workdir=", 2, ("--workdir",)),
  Case("flags/train empty config", "train --config= --workdir=run", 2, ("--config",)),
  Case("flags/train with spaces", "train --config tiny.py --workdir run", 0, ("finished",)),
  Case("flags/train one dash", "train -config=tiny.py -workdir=run", 0, ("finished",)),
  Case("flags/train workdir twice", "train $RUN --workdir=other", 0, ("finished", "other")),
  Case("flags/train key twice", "train $RUN --config.seed=1 --config.seed=2", 0, ("finished",)),
  Case("flags/train stray word", "train $RUN steps=3", 2, ("argument 'steps=3' is not a flag",)),
  Case("flags/train stray dash", "train $RUN -", 2, ("'-' is not a flag",)),
  Case("flags/train after --", "train $RUN -- --config.seed=1", 2, ("--config.seed=1",)),
  Case("flags/train key without value", "train $RUN --config.seed", 2, ("seed",)),
  Case("flags/train empty value", "train $RUN --config.seed=", 2, ("config key seed must be",)),
  Case("flags/train float for int", "train $RUN --config.seed=1e3", 2, ("seed", "'1e3'")),
  Case("flags/train bool word", "train $RUN --config.learner.remat=maybe", 2, ("learner.remat",)),
  Case("flags/train bool number", "train $RUN --config.learner.remat=1", 0, ("finished",)),
  Case("flags/train section as value", "train $RUN --config.algo=3", 2, ("algo",)),
  Case("flags/train key ends in dot", "train $RUN --config.algo.=3", 2, ("algo.",)),
  Case("flags/train two dots", "train $RUN --config..seed=3", 2, ("seed",)),
  Case("flags/train attribute", "train $RUN --config.__class__=3", 2, ("__class__",)),
  Case("flags/train key below a value", "train $RUN --config.seed.x=3", 2, ("seed.x",)),
  Case("flags/train misspelt section", "train $RUN --config.optimiser.name=lion", 2, ("name",)),
  Case("flags/train capital key", "train $RUN --config.Seed=3", 2, ("did you mean seed?",)),
  Case("flags/train no tuple", "train $RUN --config.reward.functions=strict", 2, ("functions",)),
  Case(
    "flags/train half a tuple",
    "train $RUN --config.reward.functions=\"('strict'\"",
    2,
    ("functions",),
  ),
  Case(
    "flags/train code in a value",
    "train $RUN --config.reward.functions=\"__import__('os').system('touch pwned')\"; code=$?;"
    " ls; exit $code",
    2,
    ("functions",),
    absent=("pwned\n",),
  ),
  Case(
    "flags/train words for numbers",
    "train $RUN --config.reward.weights=\"('a',)\"",
    2,
    ("weights",),
  ),
  Case(
    "flags/train half a stop id", 'train $RUN --config.sampling.stop_ids="(1.5,)"', 2, ("stop_ids",)
  ),
  Case("flags/train missing flagfile", "train --flagfile=none.txt", 2, ("none.txt",)),
  Case("flags/train flagfile", "train --flagfile=f.txt", 0, ("finished",), files={"f.txt": FLAGS}),
  Case(
    "flags/train flagfile of itself",
    "train --flagfile=f.txt",
    (0, 2),
    files={"f.txt": FLAGS + "--flagfile=f.txt\n"},
  ),
  Case("flags/train help", "train --help", (0, 1), ("--workdir",), lines=50),
  Case("flags/train empty preset", "train --config=tiny.py: --workdir=run", 2, ("no preset ''",)),
  Case(
    "flags/train two presets", "train --config=tiny.py:grpo:gspo --workdir=run", 2, ("grpo:gspo",)
  ),
  Case(
    "flags/train capital preset",
    "train --config=tiny.py:GRPO --workdir=run",
    2,
    ("no preset 'GRPO'",),
  ),
  Case(
    "flags/train newline in a value",
    "train $RUN --config.data.task=$'a\\nb'",
    2,
    ("data.task",),
    lines=1,
  ),
  Case(
    "flags/train escape in a value",
    "train $RUN --config.data.task=$'\\e[2J'",
    2,
    ("data.task",),
    absent=("\x1b",),
  ),
  Case(
    "flags/train no utf-8 in a value", "train $RUN --config.data.task=$'\\xff'", 2, ("data.task",)
  ),
  Case(
    "flags/train long value",
    "train $RUN --config.data.task=$(head -c 100000 /dev/zero | tr '\\0' a)",
    2,
    ("data.task",),
  ),
]

WORKDIR = [
  Case(
    "workdir/name is not utf-8",
    "train --config=tiny.py --workdir=$'run\\xff'; code=$?; mv run* run; exit $code",
    (0, 2),
  ),
  Case(
    "workdir/spaces and signs",
    "train --config=tiny.py --workdir='a b %s {x} [y] ü 中'",
    0,
    ("finished",),
  ),
  Case(
    "workdir/newline in the name",
    "train --config=tiny.py --workdir=$'a\\nb'; code=$?; mv a* run; exit $code",
    (0, 2),
  ),
  Case(
    "workdir/escape in the name",
    "train --config=tiny.py --workdir=$'a\\e[2J'; code=$?; mv a* run; exit $code",
    (0, 2),
    absent=("\x1b[2J",),
  ),
  Case(
    "workdir/name too long",
    f"train --config=tiny.py --workdir={LONG}",
    2,
    ("--workdir=", "too long"),
  ),
  Case(
    "workdir/path too long",
    f"train --config=tiny.py --workdir={'/'.join(['y' * 200] * 25)}",
    2,
    ("--workdir=",),
    lines=1,
  ),
  Case("workdir/in the home folder", "train --config=tiny.py --workdir=~/run", 0, ("finished",)),
  Case("workdir/quoted tilde", "train --config=tiny.py --workdir='~/run'", 0, ("finished",)),
  Case(
    "workdir/bucket", "train --config=tiny.py --workdir=gs://bucket/run", 2, ("gs://bucket/run",)
  ),
  Case("workdir/url", "train --config=tiny.py --workdir=file:///run", 2, ("file:///run",)),
  Case("workdir/dev null", "train --config=tiny.py --workdir=/dev/null", 2, ("/dev/null",)),
  Case(
    "workdir/below dev null",
    "train --config=tiny.py --workdir=/dev/null/run",
    2,
    ("/dev/null/run",),
  ),
  Case("workdir/proc", "train --config=tiny.py --workdir=/proc/run", 2, ("/proc/run",)),
  Case("workdir/a file", "train --config=tiny.py --workdir=tiny.py", 2, ("tiny.py",)),
  Case("workdir/below a file", "train --config=tiny.py --workdir=tiny.py/run", 2, ("tiny.py/run",)),
  Case("workdir/here", "train --config=tiny.py --workdir=.", 2, ("not empty",)),
  Case("workdir/a link to nothing", "train $RUN", 2, ("run",), setup=(link("run", "nowhere"),)),
  Case("workdir/a link to itself", "train $RUN", 2, ("run",), setup=(link("run", "run"),)),
  Case(
    "workdir/a link to a folder",
    "train $RUN",
    0,
    ("finished",),
    setup=(make_folder("real"), link("run", "real")),
  ),
  Case("workdir/an empty folder", "train $RUN", 0, ("finished",), setup=(make_folder("run"),)),
  Case("workdir/one hidden file", "train $RUN", 2, ("not empty",), files={"run/.DS_Store": "x"}),
  Case(
    "workdir/only a half written config",
    "train $RUN",
    0,
    ("finished",),
    files={"run/config.json.new": "{"},
    may_change=("run/config.json.new",),
  ),
  Case(
    "workdir/a folder config.json.new",
    "train $RUN",
    (0, 1, 2),
    ("config.json.new",),
    setup=(make_folder("run/config.json.new"),),
  ),
  Case("workdir/parent is missing", "train --config=tiny.py --workdir=a/b/c/d", 0, ("finished",)),
  Case(
    "workdir/unwritable parent",
    "train --config=tiny.py --workdir=locked/run",
    (1, 2),
    ("locked/run",),
    setup=(make_folder("locked"), mode("locked", 0o555)),
    as_user=True,
  ),
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
  Case("export/no out", "export --workdir=run", 2, ("flag --out is missing",), needs="run"),
  Case("export/no source", "export --out=x", 2, ("--workdir",)),
  Case(
    "export/both sources",
    "export --workdir=run --config=tiny.py --out=x",
    2,
    ("either",),
    needs="run",
  ),
  Case("export/older step", "export --workdir=run --step=2 --out=x", 0, ("step 2",), needs="run"),
  Case(
    "export/missing step",
    "export --workdir=run --step=99 --out=x",
    2,
    ("no checkpoint of step 99", "[1, 2, 3]"),
    needs="run",
  ),
  Case("export/negative step", "export --workdir=run --step=-1 --out=x", 2, ("step",), needs="run"),
  Case(
    "export/step is a word", "export --workdir=run --step=last --out=x", 2, ("step",), needs="run"
  ),
  Case("export/step zero", "export --workdir=run --step=0 --out=x", 2, ("step 0",), needs="run"),
  Case(
    "export/huge step",
    "export --workdir=run --step=99999999999999999999 --out=x",
    2,
    ("step",),
    needs="run",
  ),
  Case(
    "export/into its run",
    "export --workdir=run --out=run",
    2,
    ("not an empty folder",),
    needs="run",
  ),
  Case("export/below its run", "export --workdir=run --out=run/hf", 0, ("run/hf",), needs="run"),
  Case("export/onto a file", "export --workdir=run --out=tiny.py", 2, ("tiny.py",), needs="run"),
  Case("export/below a file", "export --workdir=run --out=tiny.py/x", 2, ("tiny.py",), needs="run"),
  Case("export/dev null", "export --workdir=run --out=/dev/null", 2, ("/dev/null",), needs="run"),
  Case("export/proc", "export --workdir=run --out=/proc/x", 2, ("/proc/x",), needs="run"),
  Case("export/root", "export --workdir=run --out=/", 2, ("/",), needs="run"),
  Case("export/long name", f"export --workdir=run --out={LONG}", 2, ("too long",), needs="run"),
  Case("export/no parent", "export --workdir=run --out=a/b/c", 0, ("a/b/c",), needs="run"),
  Case(
    "export/link to nothing",
    "export --workdir=run --out=x",
    (0, 2),
    ("x",),
    needs="run",
    setup=(link("x", "nowhere"),),
  ),
  Case(
    "export/onto a model",
    "export --workdir=run --out=model",
    2,
    ("not an empty folder",),
    needs="run model",
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
    "export/into an empty folder",
    "export --workdir=run --out=x",
    0,
    ("x",),
    needs="run",
    setup=(make_folder("x"),),
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
    "export/adapter of no lora",
    "export --workdir=run --out=x --adapter",
    2,
    ("--adapter",),
    needs="run",
  ),
  Case(
    "export/adapter",
    "export --workdir=lora --out=x --adapter",
    0,
    ("adapters",),
    needs="lora model",
  ),
  Case(
    "export/merged adapter", "export --workdir=lora --out=x", 0, ("merged",), needs="lora model"
  ),
  Case(
    "export/lora without its base", "export --workdir=lora --out=x", 2, ("model",), needs="lora"
  ),
  Case(
    "export/bucket", "export --workdir=run --out=gs://bucket/x", 2, ("gs://bucket/x",), needs="run"
  ),
  Case(
    "export/disk file limit",
    "ulimit -f 4; export --workdir=run --out=x",
    (1, 2),
    ("x",),
    needs="run",
  ),
]

SAMPLE = [
  Case("sample/nothing", "sample", 2, ("--prompt",)),
  Case("sample/empty prompt", "sample --workdir=run --prompt=", 2, ("--prompt",), needs="run"),
  Case(
    "sample/both prompts",
    "sample --workdir=run --prompt=1 --question=2",
    2,
    ("not both",),
    needs="run",
  ),
  Case("sample/prompt and no run", "sample --prompt=1+1=", 2, ("--workdir",)),
  Case("sample/n zero", "sample --workdir=run --prompt=1 --n=0", 2, ("--n is 0",), needs="run"),
  Case(
    "sample/n negative", "sample --workdir=run --prompt=1 --n=-3", 2, ("--n is -3",), needs="run"
  ),
  Case("sample/n a word", "sample --workdir=run --prompt=1 --n=many", 2, ("n",), needs="run"),
  Case(
    "sample/n beyond memory",
    "ulimit -v 30000000; sample --workdir=run --prompt=1 --n=1000000000000",
    (1, 2),
    ("n",),
    needs="run",
  ),
  Case(
    "sample/negative temperature",
    "sample --workdir=run --prompt=1 --temperature=-1",
    2,
    ("--temperature is -1",),
    needs="run",
  ),
  Case(
    "sample/infinite temperature",
    "sample --workdir=run --prompt=1 --temperature=inf",
    2,
    ("--temperature",),
    needs="run",
  ),
  Case(
    "sample/temperature 1e-40",
    "sample --workdir=run --prompt=1 --temperature=1e-40",
    (0, 2),
    needs="run",
    absent=("nan",),
  ),
  Case(
    "sample/temperature 1e-30",
    "sample --workdir=run --prompt=1 --temperature=1e-30",
    (0, 2),
    needs="run",
    absent=("nan",),
  ),
  Case(
    "sample/temperature 1e40",
    "sample --workdir=run --prompt=1 --temperature=1e40",
    (0, 2),
    needs="run",
    absent=("nan",),
  ),
  Case(
    "sample/greedy", "sample --workdir=run --prompt=1 --temperature=0", 0, ("--- 1:",), needs="run"
  ),
  Case(
    "sample/max_tokens zero",
    "sample --workdir=run --prompt=1 --max_tokens=0",
    2,
    ("--max_tokens is 0",),
    needs="run",
  ),
  Case(
    "sample/max_tokens beyond the model",
    "sample --workdir=run --prompt=1 --max_tokens=99999999",
    2,
    ("positions",),
    needs="run",
  ),
  Case(
    "sample/max_tokens beyond int64",
    "sample --workdir=run --prompt=1 --max_tokens=99999999999999999999",
    2,
    ("max_tokens",),
    needs="run",
  ),
  Case("sample/negative seed", "sample --workdir=run --prompt=1 --seed=-1", (0, 2), needs="run"),
  Case(
    "sample/seed beyond int32",
    "sample --workdir=run --prompt=1 --seed=4294967296",
    (0, 2),
    needs="run",
  ),
  Case(
    "sample/seed beyond int64",
    "sample --workdir=run --prompt=1 --seed=99999999999999999999",
    (0, 2),
    needs="run",
  ),
  Case("sample/unknown character", "sample --workdir=run --prompt=apple", 2, ("'a'",), needs="run"),
  Case("sample/emoji", "sample --workdir=run --prompt=🙂", 2, ("data.tokenizer",), needs="run"),
  Case(
    "sample/control characters",
    "sample --workdir=run --prompt=$'1\\e[2J\\a'",
    2,
    ("not in the vocabulary",),
    absent=("\x1b", "\x07"),
    needs="run",
  ),
  Case("sample/no utf-8", "sample --workdir=run --prompt=$'1\\xff'", 2, needs="run"),
  Case(
    "sample/special token as text",
    "sample --workdir=run --prompt='1<eos>2'",
    0,
    ("--- 1:", "prompt of 3 tokens"),
    needs="run",
  ),
  Case(
    "sample/long prompt",
    "sample --workdir=run --prompt=$(head -c 100000 /dev/zero | tr '\\0' 1)",
    2,
    ("positions",),
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
  Case("sample/not a run", "sample --workdir=. --prompt=1", 2, ("has no config.json",)),
  Case("sample/no folder", "sample --workdir=none --prompt=1", 2, ("none",)),
  Case("sample/a file", "sample --workdir=tiny.py --prompt=1", 2, ("tiny.py",)),
  Case(
    "sample/a model folder as run",
    "sample --workdir=model --prompt=1",
    2,
    ("model/config.json",),
    needs="model",
  ),
  Case(
    "sample/of a model",
    "sample --config=tiny.py --config.model.path=model --prompt=1",
    0,
    ("--- 4:",),
    needs="model",
  ),
  Case(
    "sample/question of chat without template",
    "sample --config=tiny.py --config.model.path=model --config.data.chat=True --question=1",
    2,
    ("chat template",),
    needs="model",
  ),
  Case(
    "sample/missing step", "sample --workdir=run --prompt=1 --step=7", 2, ("step 7",), needs="run"
  ),
]

EVALUATE = [
  Case("evaluate/nothing", "evaluate", 2, ("--workdir",)),
  Case(
    "evaluate/negative samples", "evaluate --workdir=run --samples=-1", 2, ("samples",), needs="run"
  ),
  Case(
    "evaluate/samples a word", "evaluate --workdir=run --samples=x", 2, ("samples",), needs="run"
  ),
  Case(
    "evaluate/no samples", "evaluate --workdir=run --samples=0", 0, ("95% interval",), needs="run"
  ),
  Case("evaluate/one sample", "evaluate --workdir=run --samples=1", 0, ("maj@1",), needs="run"),
  Case("evaluate/three samples", "evaluate --workdir=run --samples=3", 0, ("pass@3",), needs="run"),
  Case(
    "evaluate/zero examples", "evaluate --workdir=run --examples=0", 2, ("examples",), needs="run"
  ),
  Case(
    "evaluate/negative examples",
    "evaluate --workdir=run --examples=-5",
    2,
    ("examples",),
    needs="run",
  ),
  Case(
    "evaluate/one example",
    "evaluate --workdir=run --examples=1",
    0,
    ("1 test problem",),
    needs="run",
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
    "evaluate/older step",
    "evaluate --workdir=run --step=1",
    0,
    ("step 1", "95% interval"),
    needs="run",
  ),
  Case("evaluate/missing step", "evaluate --workdir=run --step=4", 2, ("step 4",), needs="run"),
  Case(
    "evaluate/random weights", "evaluate --config=tiny.py", 0, ("random weights", "95% interval")
  ),
  Case(
    "evaluate/other machine",
    "evaluate --workdir=run",
    0,
    ("95% interval",),
    needs="run",
    env={"JAX_NUM_CPU_DEVICES": "4"},
  ),
  Case(
    "evaluate/devices do not divide the batch",
    "evaluate --workdir=run",
    2,
    ("eval.batch",),
    needs="run",
    env={"JAX_NUM_CPU_DEVICES": "3"},
  ),
  Case(
    "evaluate/read only",
    "evaluate --workdir=run",
    0,
    ("95% interval",),
    needs="run",
    as_user=True,
  ),
  Case(
    "evaluate/foreign config",
    "evaluate --workdir=run",
    2,
    ("run/config.json",),
    needs="run",
    setup=(write("run/config.json", '{"width": 3}'),),
    may_change=(),
  ),
]

CASES = [*TRAIN, *WORKDIR, *EXPORT, *SAMPLE, *EVALUATE]
