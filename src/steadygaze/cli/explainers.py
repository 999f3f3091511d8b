"""`steadygaze diffmask train` and `steadygaze shapley train`: train an explanation method for a model.

Torch is imported inside the functions.

Exit codes: 0, success; 1, training failed or was too short, or images could not be read; 2, invalid input;
3, the file could not be written; 130, interrupted.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steadygaze.cli import options
from steadygaze.cli.options import DATA, OUTPUT, TRAINING, HelpfulCommand

if TYPE_CHECKING:
    from steadygaze.training.explainers import ExplainerRequest

DIFFMASK = """Learn which patches the model needs for its prediction; the model itself is not changed.

Keys of --set, with the paper's values: batch=16, seed=0, gate_rate=2e-5, baseline_rate=1e-3, dual_rate=0.3,
dual_start=20, warmup=1200 (steps), margin=0.1 (permitted KL divergence), stretch=15, shift=8,
begin=drawn|open, kl=all|class, target=CLASS, layers=uniform|weighted, l0=norm|log, tokens=patches|all,
slow=start|first_sync, dual=ascent|reference, restarts=0, restart_with=seed|stretch, warm_start=FILE,
preset=cifar10|imagenet|reference (comma-separated; reference: the values of the authors' code).

Example: steadygaze diffmask train -m deit_tiny_patch16_224 -d photos -o gates.safetensors
Example: steadygaze diffmask train -m embedded -d photos -o gates.safetensors --set seed=1 --set batch=8
Example: steadygaze explain cat.jpg -m deit_tiny_patch16_224 -M diffmask --diffmask gates.safetensors
"""
SHAPLEY = """Learn to predict the Shapley values of an image's patches; the model itself is not changed.

Keys of --set: batch=32, seed=0, pairs=2 (of patch subsets for each image), rate=1e-3, warmup=200 (steps),
surrogate=model|train (explain the model itself with removed patches, or a copy that is fine-tuned on such
images first, for surrogate_steps=1000 with surrogate_rate=1e-4, as in the paper), trunk=model|train (read
hidden states of the model itself, or of a copy that is fine-tuned with trunk_rate=1e-4, as in the paper).

Example: steadygaze shapley train -m deit_tiny_patch16_224 -d photos -o shapley.safetensors --set batch=16
Example: steadygaze explain cat.jpg -m deit_tiny_patch16_224 -M vit_shapley --shapley shapley.safetensors
"""


def _group(method: str, title: str, help_text: str) -> typer.Typer:
    """The command group of a method, with the command `train`."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=title)
    group.callback()(lambda: None)  # keeps the name of a single command: `diffmask train`

    @group.command(cls=HelpfulCommand, help=help_text)
    def train(
        model: options.Model,
        data: Annotated[
            list[Path],
            typer.Option(
                "--data",
                "-d",
                metavar="FOLDER",
                help="Folder of images, searched recursively; labels are not needed. May be repeated.",
                rich_help_panel=DATA,
            ),
        ],
        out: Annotated[
            Path,
            typer.Option(
                "--out",
                "-o",
                metavar="FILE",
                help="Output file, .safetensors. Repeat the command to resume.",
                rich_help_panel=OUTPUT,
            ),
        ],
        checkpoint: options.Checkpoint = None,
        steps: Annotated[
            int | None,
            typer.Option(
                metavar="N",
                min=1,
                help="Number of training steps. Default: determined by --epochs.",
                rich_help_panel=TRAINING,
            ),
        ] = None,
        epochs: Annotated[
            int,
            typer.Option(
                metavar="N", min=1, help="Number of passes over the images.", rich_help_panel=TRAINING
            ),
        ] = 5,
        settings: Annotated[
            list[str] | None,
            typer.Option(
                "--set",
                metavar="KEY=VALUE",
                help="A setting of the method. Repeat the option for more.",
                rich_help_panel=TRAINING,
            ),
        ] = None,
        save_every: Annotated[
            int,
            typer.Option(metavar="N", min=1, help="Number of steps between saves.", rich_help_panel=TRAINING),
        ] = 200,
        num_classes: options.NumClasses = None,
        device: options.Device = "auto",
        trust_remote_code: options.TrustRemoteCode = False,
    ) -> None:
        from steadygaze.cli.train import parse_settings
        from steadygaze.training.explainers import ExplainerRequest

        request = ExplainerRequest(
            model=model,
            data=data,
            out=out,
            checkpoint=checkpoint,
            options=parse_settings(settings or []),
            steps=steps,
            epochs=epochs,
            save_every=save_every,
            num_classes=num_classes,
            device=device,
            trust_remote_code=trust_remote_code,
        )
        raise typer.Exit(run(method, request))

    return group


diffmask = _group("diffmask", "Vision DiffMask: train the gates that --diffmask uses.", DIFFMASK)
shapley = _group("vit_shapley", "ViT-Shapley: train the explainer that --shapley uses.", SHAPLEY)


def run(method: str, request: ExplainerRequest) -> int:
    """Train with a progress bar and print the result; returns the exit code."""
    from rich.console import Console

    from steadygaze.cli.output import print_line
    from steadygaze.cli.train import print_list, supervised
    from steadygaze.training.explainers import ExplainerRun

    trainer = import_module(f"steadygaze.training.{method}").Trainer
    training = ExplainerRun(trainer, request)
    begin = f", resumed after {training.resumed}" if training.resumed else ""
    steps = f"{training.total_steps} steps of {training.settings.batch}"
    notes = Console(stderr=True)
    print_line(notes, f"{request.model}: {len(training.images.files)} images, {steps}{begin}")
    with supervised(request.out) as on_progress:
        result = training.execute(on_progress)
    console = Console()
    print_line(console, f"{request.out}: {result.steps} steps; {result.summary}")
    print_list(console, "not used", result.unreadable)
    if result.too_early:
        print_line(console, f"not trained yet: {result.problem}. {trainer.too_early_advice}", "red")
    elif result.problem:
        print_line(console, f"diverged: {result.problem}. {trainer.diverged_advice}", "red")
    return 1 if result.problem or result.unreadable else 0
