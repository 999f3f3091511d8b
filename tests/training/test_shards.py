"""Training on WebDataset shards: the same run as on a folder."""

import gzip

import pytest
from typer.testing import CliRunner

import steadygaze as sg
from helpers.shards import write_tar
from helpers.training import CLASSES, content, image_folder, same, weights
from steadygaze.cli import app
from steadygaze.training.recipe import make_recipe


def recipe(data: str, **more):
    made = content(data, **more)
    return make_recipe({**made, "epochs": 1})


def test_shards_train_as_folders_do(tmp_path):
    folder = image_folder(tmp_path / "folder", each=4)
    members = []
    for number in range(4):  # in the order of folders, which visits the classes evenly
        for label, name in enumerate(CLASSES):
            image = (folder / name / f"{number}.png").read_bytes()
            members += [(f"{name}{number}.png", image), (f"{name}{number}.cls", str(label).encode())]
    for shard in range(2):
        write_tar(tmp_path / f"{shard}.tar", members[8 * shard : 8 * shard + 8])
    (tmp_path / "names.txt").write_text("\n".join(CLASSES))
    data = f"wds:{tmp_path}/{{0,1}}.tar?label_names={tmp_path}/names.txt"
    sg.train(recipe(str(folder)), tmp_path / "a", device="cpu")
    sg.train(recipe(data), tmp_path / "b", device="cpu")
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert sg.load_model(str(tmp_path / "b")).class_names == CLASSES
    frame = sg.verify(sg.load_model(str(tmp_path / "b")), data, methods="ixg", ratios=[0.5]).to_pandas()
    assert len(set(frame["image"])) == 8


def test_shards_that_cannot_be_trained_on(tmp_path):
    folder = image_folder(tmp_path / "folder", each=1)
    image = (folder / "dark" / "0.png").read_bytes()
    (tmp_path / "names.txt").write_text("\n".join(CLASSES))
    names = f"?label_names={tmp_path}/names.txt"
    file = write_tar(
        tmp_path / "0.tar", [("a.png", image), ("a.cls", b"0"), ("b.png", image), ("b.cls", b"5")]
    )
    with pytest.raises(sg.InputError, match=r"data\.train: .*0\.tar: b: label '5'"):
        sg.train(recipe(f"wds:{file}{names}"), tmp_path / "out", device="cpu")
    write_tar(file, [("a.png", image), ("a.cls", b"0"), ("b.png", image), ("b.cls", b"1")])
    (tmp_path / "0.tar.gz").write_bytes(gzip.compress(file.read_bytes()))
    with pytest.raises(sg.InputError, match=r"random order: expected local tar archives .*0\.tar\.gz"):
        sg.train(recipe(f"wds:{file}.gz{names}"), tmp_path / "out", device="cpu")
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(sg.InputError, match=r"0\.tar: cannot be read further"):
        sg.train(recipe(f"wds:{file}{names}"), tmp_path / "out", device="cpu")
    with pytest.raises(sg.InputError, match=r"expected a folder or local WebDataset shards"):
        sg.train(recipe("hf:./folder"), tmp_path / "out", device="cpu")


PIPES = ["wds:pipe:touch {mark}; cat {tar}", "wds:{tar}::pipe:touch {mark}", "wds:pi{{pe,pe}}:touch {mark}"]


@pytest.mark.parametrize("pattern", PIPES)
@pytest.mark.parametrize("part", ["train", "test", "measure"])
def test_a_recipe_runs_no_command(tmp_path, part, pattern):
    folder = image_folder(tmp_path / "folder", each=1)
    for number, name in enumerate(CLASSES):  # of CIFAR-10
        (folder / name).rename(folder / str(number))
    tar = write_tar(tmp_path / "0.tar", [])
    data = pattern.format(mark=tmp_path / "mark", tar=tar)
    lines = [f'[model]\nname = "embedded"\n[data]\ntrain = "{data if part == "train" else folder}"']
    lines += [f'test = "{data}"'] if part == "test" else []
    lines += [f'[measure]\ndata = "{data}"'] if part == "measure" else []
    file = tmp_path / "recipe.toml"
    file.write_text("\n".join(lines))
    commands = {"train": [["train"], ["train", "--dry-run"], ["sweep", "--set", f"data.test={folder}"]]}
    commands |= {"test": [["train"], ["train", "--dry-run"], ["sweep"]], "measure": [["sweep"]]}
    for number, command in enumerate(commands[part]):
        done = CliRunner().invoke(app, [*command, str(file), "-o", str(tmp_path / f"out{number}")])
        assert done.exit_code != 0 and not (tmp_path / "mark").exists(), done.output
        assert "would run a shell command" in " ".join(done.output.split()), done.output


def test_a_command_is_run_if_the_user_gives_it(tmp_path):
    folder = image_folder(tmp_path / "folder", each=1)
    for number, name in enumerate(CLASSES):
        (folder / name).rename(folder / str(number))
    tar = write_tar(tmp_path / "0.tar", [])
    mark = tmp_path / "mark"
    data = f"wds:pipe:touch {mark}; cat {tar}"
    file = tmp_path / "recipe.toml"
    tables = f'[model]\nname = "embedded"\n[data]\ntrain = "{folder}"\n'
    out = ["-o", str(tmp_path / "out")]
    for command in ("train", "sweep"):
        file.write_text(f'{tables}test = "{data}"')
        CliRunner().invoke(app, [command, str(file), "--allow-pipe", *out])
        assert mark.exists()
        mark.unlink()
        file.write_text(tables)
        CliRunner().invoke(app, [command, str(file), "--set", f"data.test={data}", *out])
        assert mark.exists()
        mark.unlink()
    file.write_text(f'{tables}test = "{data}"')  # what the user replaces is not run
    replaced = ["--set", f"data.test={folder}", "--dry-run"]
    done = CliRunner().invoke(app, ["train", str(file), *replaced, *out])
    assert done.exit_code == 0 and not mark.exists(), done.output
