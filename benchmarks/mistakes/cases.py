"""A hundred mistakes of a new user: what was done, where, and with which command.

Every case starts from the same good files (`folder.py`); it replaces text in them or adds files.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Case(NamedTuple):
    """A command, without `thinpipe`, in a folder with one thing wrong.

    `swap` is text that is replaced in the run file, `files` are written over the good ones.
    `setup` is a shell command that comes first; the command "--" is no more than that.
    """

    area: str
    what: str
    command: str
    swap: tuple[str, str] | None = None
    files: Mapping[str, str | bytes] = {}
    setup: str = ""


DRY = "train run.toml --dry-run"

COMMAND_LINE = [
    Case("command line", "misspelt command", "trian run.toml"),
    Case("command line", "run file forgotten", "train"),
    Case("command line", "two run files", "train run.toml run.toml"),
    Case("command line", "text for a number", "train run.toml --max-restarts many"),
    Case("command line", "--nnodes without --rdzv", "train run.toml --nnodes 2"),
    Case("command line", "--rdzv without port", "train run.toml --nnodes 2 --rdzv host0"),
    Case("command line", "--rdzv as a URL", "train run.toml --nnodes 2 --rdzv http://h:29500"),
    Case("command line", "--nnodes 0", "train run.toml --nnodes 0"),
    Case("command line", "--set with a space", f"{DRY} --set train.lr =1"),
    Case("command line", "--set of a whole section", f"{DRY} --set train=3"),
    Case("command line", "torchrun's option", "train run.toml --nproc-per-node 4"),
    Case("command line", "help word", "help"),
    Case("command line", "version word", "version"),
    Case("command line", "program given to train", "train mine.py --dry-run"),
    Case("command line", "run folder given to train", "train runs/done --dry-run"),
]

RUN_FILE = [
    Case("run file", "text from JSON", DRY, ("cuts = [2]", '"cuts": [2],')),
    Case("run file", "true for an integer", DRY, ("epochs = 1", "epochs = true")),
    Case("run file", "true for a number", DRY, ("epochs = 1", "epochs = 1\nlr = true")),
    Case("run file", "rate in quotes", DRY, ("epochs = 1", 'epochs = 1\nlr = "1e-3"')),
    Case("run file", "decimal comma", DRY, ("epochs = 1", "epochs = 1\nlr = 0,001")),
    Case("run file", "a section twice", DRY, ("[train]", "[train]\nlr = 1e-3\n[train]")),
    Case("run file", "section of another tool", DRY, ("[train]", "[optimizer]\nlr = 1\n[train]")),
    Case("run file", "[boundary] for [[boundary]]", DRY, ("[[boundary]]", "[boundary]")),
    Case("run file", "key outside its section", DRY, ("[run]", "epochs = 3\n[run]")),
    Case("run file", "a name with a slash", DRY, ('name = "r"', 'name = "my/run"')),
    Case("run file", "empty cuts in text", DRY, ("cuts = [2]", 'cuts = "2"')),
    Case("run file", "a cut as number", DRY, ("cuts = [2]", "cuts = 2")),
    Case("run file", "auto without stages", DRY, ("cuts = [2]", 'cuts = "auto"')),
    Case("run file", "stages beside cuts", DRY, ("cuts = [2]", "cuts = [2]\nstages = 4")),
    Case("run file", "16 bits", DRY, ("bits = 4", "bits = 16")),
    Case("run file", "half a bit", DRY, ("bits = 4", "bits = 2.5")),
    Case("run file", "kind misspelt", DRY, ('"aqsgd"', '"aqsdg"')),
    Case("run file", "heads do not divide width", DRY, ("heads = 2", "heads = 3")),
    Case("run file", "byte order mark", DRY, ("[run]", "\ufeff[run]")),
    Case("run file", "UTF-16", DRY, setup="iconv -t UTF-16 run.toml > w; mv w run.toml"),
    Case("run file", "not readable: dangling link", DRY, setup="ln -sf nowhere run.toml"),
    Case("run file", "/dev/zero", "train /dev/zero --dry-run"),
    Case("run file", "a FIFO", "train fifo --dry-run", setup="mkfifo fifo"),
    Case("run file", "a picture", DRY, files={"run.toml": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"}),
    Case("run file", "extends a missing file", DRY, ("[run]", 'extends = "base.toml"\n[run]')),
    Case("run file", "extends a number", DRY, ("[run]", "extends = 3\n[run]")),
    Case("run file", "folder is a file", DRY, ('name = "r"', 'folder = "text.txt"')),
    Case("run file", "empty", DRY, files={"run.toml": ""}),
    Case("run file", "infinite epochs", DRY, ("epochs = 1", "epochs = inf")),
]

HOSTS = '[[host]]\nname = "a"\ncheckout = "x"\n'
LAUNCH = "launch hosts.toml run.toml --dry-run"

HOSTS_FILE = [
    Case("hosts file", "arguments the wrong way round", "launch run.toml hosts.toml --dry-run"),
    Case("hosts file", "no file", "launch nohosts.toml run.toml --dry-run"),
    Case("hosts file", "hosts as a list", LAUNCH, files={"hosts.toml": 'hosts = ["a", "b"]'}),
    Case(
        "hosts file",
        "user in the address",
        LAUNCH,
        files={"hosts.toml": HOSTS + 'address = "ada@10.0.0.1"\n'},
    ),
    Case(
        "hosts file",
        "port in the address",
        LAUNCH,
        files={"hosts.toml": HOSTS + 'address = "10.0.0.1:22"\n'},
    ),
    Case(
        "hosts file",
        "rdzv without port",
        LAUNCH,
        files={"hosts.toml": 'rdzv = "10.0.0.1"\n' + HOSTS},
    ),
    Case("hosts file", "true for a port", LAUNCH, files={"hosts.toml": HOSTS + "port = true\n"}),
    Case(
        "hosts file",
        "ranks that do not add up",
        LAUNCH,
        files={"hosts.toml": HOSTS + "ranks = 5\n"},
    ),
    Case(
        "hosts file",
        "number in environment",
        LAUNCH,
        files={"hosts.toml": HOSTS + "environment = { OMP_NUM_THREADS = 8 }\n"},
    ),
    Case("hosts file", "UTF-16", LAUNCH, setup="iconv -t UTF-16 hosts.toml > w; mv w hosts.toml"),
    Case(
        "hosts file",
        "host that does not exist",
        "launch hosts.toml run.toml",
        files={"hosts.toml": '[[host]]\nname = "a"\naddress = "nohost.invalid"\ncheckout = "x"\n'},
    ),
    Case("hosts file", "a program, with a typo", "launch hosts.toml mein.py --dry-run"),
    Case(
        "hosts file",
        "three hosts for two ranks",
        LAUNCH,
        files={"hosts.toml": "".join(HOSTS.replace('"a"', f'"{name}"') for name in "abc")},
    ),
]

RUN = "run mine.py"
MINE = "cuts=[2], microbatches=2"

OWN_CODE = [
    Case("own code", "syntax error", RUN, files={"mine.py": "import thinpipe as tp\nx = (\n"}),
    Case("own code", "module that is missing", RUN, files={"mine.py": "import mymodul\n"}),
    Case("own code", "no Run", RUN, files={"mine.py": "print('hello')\n"}),
    Case(
        "own code",
        "behind if __name__, misspelt",
        RUN,
        files={
            "mine.py": "import thinpipe as tp\nif __name__ == '__mian__':\n    tp.Run('a', None)\n"
        },
    ),
    Case(
        "own code",
        "Run without Pipeline",
        RUN,
        files={"mine.py": "import thinpipe as tp, mymodel\ntp.Run('runs/m', mymodel.model())\n"},
    ),
    Case(
        "own code",
        "a module for the function",
        RUN,
        setup="sed -i 's/mymodel.model,/mymodel.model(),/' mine.py",
    ),
    Case(
        "own code",
        "function returns a list",
        RUN,
        setup=("sed -i 's/nn.Sequential(nn.Emb/list((nn.Emb/; s/, VOCAB))/, VOCAB)))/' mymodel.py"),
    ),
    Case(
        "own code",
        "argument misspelt",
        RUN,
        setup="sed -i 's/microbatches=/micro_batches=/' mine.py",
    ),
    Case("own code", "bits out of range", RUN, setup="sed -i 's/bits=4/bits=40/' mine.py"),
    Case("own code", "resume=True", RUN, setup="sed -i 's/\"never\"/True/' mine.py"),
    Case("own code", "started with python", "--", setup="python mine.py"),
    Case(
        "own code",
        "loss returns a mean only",
        RUN,
        setup=("sed -i 's/return total, target.numel()/return total/' mymodel.py"),
    ),
    Case(
        "own code",
        "dataset returns one tensor",
        RUN,
        setup=("sed -i 's/return x\\[:-1\\], x\\[1:\\]/return x/' mymodel.py"),
    ),
    Case(
        "own code",
        "dataset of other lengths",
        RUN,
        setup=("sed -i 's/x = self.x\\[i\\]/x = self.x[i, : 5 + i]/' mymodel.py"),
    ),
    Case("own code", "batch left out", RUN, setup="sed -i 's/run.step(batch)/pass/' mine.py"),
    Case(
        "own code",
        "optimizer of other parameters",
        RUN,
        setup=("sed -i 's/pipe.parameters()/mymodel.model().parameters()/' mine.py"),
    ),
    Case(
        "own code",
        "error in the middle",
        RUN,
        setup=("sed -i 's/run.step(batch)/run.step(batch); 1 \\/ 0/' mine.py"),
    ),
    Case(
        "own code",
        "factory without colon",
        DRY,
        files={
            "run.toml": (
                '[model]\nfactory = "mymodel.model"\n[data]\nfactory = "mymodel:training"\n'
            )
        },
    ),
    Case(
        "own code",
        "factory that does not exist",
        DRY,
        files={
            "run.toml": (
                '[model]\nfactory = "mymodel:modell"\n[data]\nfactory = "mymodel:training"\n'
            )
        },
    ),
]

TEXT = 'path = "text.txt"'

DATA = [
    Case("data", "path misspelt", DRY, (TEXT, 'path = "txt.txt"')),
    Case("data", "a folder without files", DRY, (TEXT, 'path = "empty"'), setup="mkdir empty"),
    Case("data", "/dev/zero", DRY, (TEXT, 'path = "/dev/zero"')),
    Case("data", "a FIFO", DRY, (TEXT, 'path = "fifo"'), setup="mkfifo fifo"),
    Case("data", "dangling link", DRY, (TEXT, 'path = "link"'), setup="ln -s nowhere link"),
    Case(
        "data",
        "a binary file",
        DRY,
        (TEXT, 'path = "b.bin"'),
        setup="head -c 30000 /bin/sh > b.bin",
    ),
    Case("data", "too short a text", DRY, (TEXT, 'path = "s.txt"'), {"s.txt": "hello world\n"}),
    Case("data", "a URL", DRY, (TEXT, 'path = "https://example.org/text.txt"')),
    Case(
        "data",
        "JSONL with a broken line",
        DRY,
        (TEXT, 'path = "d.jsonl"\ntext_field = "t"'),
        {"d.jsonl": '{"t": "a"}\n{"t": \n'},
    ),
    Case(
        "data",
        "JSONL, field misspelt",
        DRY,
        (TEXT, 'path = "d.jsonl"\ntext_field = "text"'),
        {"d.jsonl": '{"t": "a"}\n' * 20},
    ),
    Case(
        "data", "CSV", DRY, (TEXT, 'path = "d.csv"\ntext_field = "t"'), {"d.csv": "t,u\na,b\n" * 9}
    ),
    Case(
        "data",
        "more samples than there are",
        DRY,
        ("train_sequences = 64", "train_sequences = 9999"),
    ),
    Case("data", "batch larger than the samples", DRY, ("batch_size = 8", "batch_size = 128")),
]

HF = [
    Case(
        "Hugging Face",
        "name of the hub",
        DRY,
        ("layers = 4", 'pretrained = "gpt2"'),
        setup=("sed -i '/width\\|heads\\|context/d' run.toml"),
    ),
    Case(
        "Hugging Face",
        "folder without config.json",
        DRY,
        files={"run.toml": '[model]\npretrained = "empty"\n'},
        setup="mkdir empty",
    ),
    Case(
        "Hugging Face",
        "config.json broken",
        DRY,
        files={"run.toml": '[model]\nconfig = "m"\n', "m/config.json": '{"model_type": "gpt2",'},
    ),
    Case(
        "Hugging Face",
        "unknown model type",
        DRY,
        files={"run.toml": '[model]\nconfig = "m"\n', "m/config.json": '{"model_type": "gtp2"}'},
    ),
    Case(
        "Hugging Face",
        "encoder-decoder",
        DRY,
        files={"run.toml": '[model]\nconfig = "m"\n', "m/config.json": '{"model_type": "t5"}'},
    ),
    Case(
        "Hugging Face",
        "weights missing",
        DRY,
        files={
            "run.toml": '[model]\npretrained = "m"\n',
            "m/config.json": '{"model_type": "gpt2"}',
        },
    ),
    Case(
        "Hugging Face",
        "layers beside pretrained",
        DRY,
        files={
            "run.toml": '[model]\nconfig = "m"\nlayers = 4\n',
            "m/config.json": '{"model_type": "gpt2"}',
        },
    ),
    Case(
        "Hugging Face",
        "sequence longer than the model",
        DRY,
        files={
            "run.toml": '[model]\nconfig = "m"\n[data]\nsequence_length = 4096\n',
            "m/config.json": '{"model_type": "gpt2", "n_positions": 64}',
        },
    ),
]

AFTERWARDS = [
    Case("resume", "nothing to resume from", "train run.toml --resume --dry-run"),
    Case("resume", "--step without --resume", "train run.toml --step 3 --dry-run"),
    Case(
        "resume",
        "a step that was not saved",
        "train run.toml --resume --step 3 --set run.name=done",
    ),
    Case(
        "resume",
        "another model",
        "train run.toml --resume --set run.name=done --set model.width=64",
    ),
    Case(
        "resume",
        "checkpoint emptied by hand",
        "train run.toml --resume --set run.name=done",
        setup=("find runs/done/checkpoints -type f -name '*.safetensors' -exec truncate -s 0 {} +"),
    ),
    Case("resume", "checkpoints of another name", "train run.toml --resume --set run.name=dnoe"),
    Case("export", "folder that is no run", "export examples out"),
    Case(
        "export",
        "out is there",
        "export runs/done out.safetensors --format safetensors",
        files={"out.safetensors": "x"},
    ),
    Case("export", "to hf of an own model", "export runs/done out"),
    Case("export", "format misspelt", "export runs/done out --format safetensor"),
    Case(
        "export",
        "checkpoints removed",
        "export runs/done out --format safetensors",
        setup=("rm -r runs/done/checkpoints"),
    ),
    Case("generate", "no prompt in quotes", "generate runs/done --prompt once upon"),
    Case("generate", "temperature below 0", "generate runs/done --prompt a --temperature -1"),
    Case("generate", "folder misspelt", "generate runs/dome --prompt a"),
    Case("generate", "the checkpoint folder", "generate runs/done/checkpoints --prompt a"),
    Case("report", "run that is not there", "report runs/nope"),
    Case("report", "the metrics file", "report runs/done/metrics.jsonl"),
    Case(
        "report",
        "metrics cut off",
        "report runs/done",
        setup=("truncate -s -5 runs/done/metrics.jsonl"),
    ),
    Case(
        "report",
        "metrics emptied",
        "report runs/done",
        setup="truncate -s 0 runs/done/metrics.jsonl",
    ),
    Case("trace", "rate without unit", "trace runs/done --rate 100"),
    Case("plan", "rate with a slash", "plan run.toml --rate 100Mbit/s"),
    Case("plan", "delay without unit", "plan run.toml --delay 20"),
    Case("plan", "network file missing", "plan run.toml --network net.json"),
    Case("plan", "network file is TOML", "plan run.toml --network run.toml"),
    Case("plan", "too many speeds", "plan run.toml --speeds 1,2,3"),
    Case("plan", "rate of none", "plan run.toml --rate none"),
    Case("doctor", "--nnodes without --rdzv", "doctor run.toml --nnodes 2"),
    Case(
        "doctor",
        "host cannot be resolved",
        "doctor run.toml --nnodes 2 --rdzv nohost.invalid:29500",
    ),
    Case(
        "doctor", "key file missing", "doctor run.toml --nnodes 2 --rdzv 10.255.0.1:29500 --wait 3"
    ),
    Case("key", "key is there already", "key new run.key", files={"run.key": "x"}),
    Case(
        "key",
        "key that is none",
        "train run.toml --nnodes 2 --rdzv 10.255.0.1:29500 --set network.key_file=run.key",
        files={"run.key": "x"},
    ),
]

CASES = [*COMMAND_LINE, *RUN_FILE, *HOSTS_FILE, *OWN_CODE, *DATA, *HF, *AFTERWARDS]
