"""The command line. Only typer and rich are imported here; every command imports what it needs, so help is quick."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from configs.errors import NightjarError
from flows.deploy_command import register as register_deploy
from flows.exit_codes import USER
from flows.farewell import leave
from training.disk import full_disk_in_words

HELP = """[bold]Nightjar[/]: nightly offline RLHF that a team can leave alone.

One YAML file is one night: validate new preference data, train and distil a reward model, improve the policy offline,
judge it beside the version in production, and promote it if, and only if, it is better and safe.

A first night on two CPU cores, with nothing to download:  [cyan]nightjar run configs/quickstart.yaml[/]
"""

app = typer.Typer(
    name="nightjar", help=HELP, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False
)
gate_app = typer.Typer(help="Look at what the gate decided.", no_args_is_help=True)
app.add_typer(gate_app, name="gate")

Config = Annotated[Path, typer.Argument(help="The night's YAML, e.g. configs/quickstart.yaml.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings laid over the YAML: key.path=value, e.g. ppo.actor_lr=1e-5.", show_default=False),
]
Home = Annotated[
    Path | None,
    typer.Option("--home", help="Folder of runs, models and journal. Default: NIGHTJAR_HOME, or .nightjar here."),
]
Chain = Annotated[
    str | None,
    typer.Option("--chain", help="`name` of the chain's config. Needed when the home holds several chains."),
]
Model = Annotated[
    str | None, typer.Option("--model", help="Registered model, which names the chain as well.", metavar="NAME")
]


def _text(given: str) -> str:
    """A reason is kept for ever in files and databases of UTF-8; another terminal's bytes cannot be."""
    try:
        given.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("is no text in UTF-8; write it anew") from None
    return given


@app.command()
def run(
    config: Config,
    overrides: Overrides = None,
    again: Annotated[bool, typer.Option("--again", help="Run a new night even without new data.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Promote whatever the gate says. Needs --why; both are recorded.")
    ] = False,
    why: Annotated[str, typer.Option(callback=_text, help="With --force: the reason.")] = "",
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of a live display.")] = False,
) -> None:
    """Run tonight, or go on with a night that broke off.

    A night that was killed continues where it stopped and trains nothing twice. Without new data there is nothing to
    do, and the command says so. Exit code: 0 promoted or nothing to do, 3 judged and not promoted, 2 something you can
    mend (the message says what), 4 another night is at work on this home, 1 a defect.
    """
    from flows.run_command import run_night

    raise typer.Exit(run_night(str(config), overrides or [], again=again, force=force, why=why, plain=plain))


@app.command()
def validate(config: Config, overrides: Overrides = None) -> None:
    """Check a config, and the model folders and files it names, without computing anything.

    Answers in under two seconds; names every wrong key and what to write instead.
    """
    from flows.validate_command import validate_config

    say(validate_config(config, overrides or []))


@app.command()
def status(
    home: Home = None, nights: Annotated[int, typer.Option(min=1, help="How many nights to show.")] = 10
) -> None:
    """Show the last nights, the champion and its predecessor, and open problems."""
    from flows.status_view import status_view

    Console().print(status_view(_home(home), nights))


@app.command()
def rollback(
    why: Annotated[
        str, typer.Option(callback=_text, help="The reason; becomes a tag of the version that is taken down.")
    ],
    to: Annotated[str | None, typer.Option(help="Version to return to. Default: the champion before this one.")] = None,
    home: Home = None,
    chain: Chain = None,
    model: Model = None,
) -> None:
    """Put an earlier champion back. Doing it twice changes nothing; without an earlier one it is refused."""
    from flows.registry_commands import roll_back

    say(roll_back(_home(home), to, why, chain, model))


@app.command()
def promote(
    version: Annotated[str, typer.Argument(help="Number of a registered version.", show_default=False)],
    force: Annotated[
        bool, typer.Option("--force", help="Whatever the gate or an earlier rollback says. Needs --why.")
    ] = False,
    why: Annotated[
        str, typer.Option(callback=_text, help="With --force: the reason; becomes part of the version's record.")
    ] = "",
    home: Home = None,
    chain: Chain = None,
    model: Model = None,
) -> None:
    """Make a registered version champion, verified as in a night.

    Refused where the gate did not pass it, where it was judged against another champion, or where it was rolled back
    before, unless --force says why. Doing it twice changes nothing.
    """
    from flows.registry_commands import promote as promote_version

    say(promote_version(_home(home), version, force=force, why=why, chain=chain, model=model))


@app.command()
def retention(
    apply: Annotated[bool, typer.Option("--apply", help="Delete them. Default: only show what would go.")] = False,
    keep: Annotated[
        int | None,
        typer.Option(min=0, help="How many of the newest versions stay. Default: registry.retention_keep."),
    ] = None,
    home: Home = None,
    chain: Chain = None,
    model: Model = None,
) -> None:
    """Show which old versions could be deleted, and delete them with --apply. No night ever does.

    Never deleted: what any alias names, whatever a rollback may return to, what waits for a person's answer, and what
    Nightjar did not register. Refused while a night is at work on this home.
    """
    from flows.registry_commands import retain_versions

    say(retain_versions(_home(home), apply=apply, keep=keep, chain=chain, model=model))


@app.command()
def reconcile(
    home: Home = None,
    chain: Chain = None,
    model: Model = None,
    adopt: Annotated[
        bool,
        typer.Option("--adopt", help="Take the registry as it is, where journal or database was lost. Needs --why."),
    ] = False,
    why: Annotated[str, typer.Option(callback=_text, help="With --adopt: the reason; it goes into the journal.")] = "",
) -> None:
    """Close what killed processes left open: half promotions are reverted, dead MLflow runs ended. Safe at any time.

    Says when journal and registry contradict each other, and then changes no champion. Exit code 2 says that something
    is left for a person, 4 that a promotion or rollback is at work: repeat the command when it has ended.
    """
    from flows.registry_commands import reconcile_now

    told, code = reconcile_now(_home(home), chain, model, why if adopt else None)
    say(told)
    raise typer.Exit(code)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask.", show_default=False)],
    model: Annotated[
        str | None, typer.Option(help="models:/NAME@champion, models:/NAME/3. Default: the home's champion.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    home: Home = None,
    chain: Chain = None,
) -> None:
    """Ask a registered version, loaded the way any MLflow user loads it."""
    from flows.registry_commands import answer

    typer.echo(answer(_home(home), model, prompt, max_new_tokens, chain))


@app.command()
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on loopback.")] = 5000, home: Home = None
) -> None:
    """Open this home in MLflow's web interface, on loopback only. Ctrl-C ends it."""
    from flows.ui_command import serve_ui

    raise typer.Exit(serve_ui(_home(home), port))


@gate_app.command("explain")
def gate_explain(
    night: Annotated[str, typer.Argument(help="Name of a night, as `nightjar status` shows it.", show_default=False)],
    home: Home = None,
) -> None:
    """Tell a night's decision again, judged once more from its stored report and rules."""
    from flows.registry_commands import explain_gate

    typer.echo(explain_gate(_home(home), night))


@app.command()
def watch(
    home: Home = None,
    chain: Chain = None,
    model: Model = None,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of a live display.")] = False,
) -> None:
    """Measure the champion again and hold it against the limits under watch: in the config.

    After `watch.patience` breaches in a row the previous champion is put back. Exit code 3 says that a limit was
    broken.
    """
    from flows.run_command import run_watch

    raise typer.Exit(run_watch(_home(home), plain=plain, chain=chain, model=model))


@app.command()
def doctor(config: Annotated[Path | None, typer.Argument(help="Check this config's needs too.")] = None) -> None:
    """Check versions, disk, write access, devices, MLflow, Prefect and clock, and say what to do."""
    from flows.doctor_view import doctor_view

    view, healthy = doctor_view(config)
    Console().print(view)
    raise typer.Exit(0 if healthy else USER)


@app.command()
def drill(
    server: Annotated[
        bool,
        typer.Option("--server", help="On the server of MLFLOW_TRACKING_URI, under a name of its own that is removed."),
    ] = False,
) -> None:
    """Practise: promote, kill, breach and roll back in a scratch registry, and show what was seen at each step.

    Uses the code of real nights on a tiny model, in a database in a temporary folder unless --server is given. Touches
    no model of yours and leaves nothing behind. Exit code 1 says that a step failed.
    """
    from flows.drill_command import run_drill

    raise typer.Exit(run_drill(server))


register_deploy(app)


def say(text: str) -> None:
    """Print a message that may hold brackets."""
    Console().print(escape(text), highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point. An error that somebody can mend is said in words; only a defect shows a traceback."""
    try:
        with full_disk_in_words(Path(os.environ.get("NIGHTJAR_HOME", ".nightjar"))):
            app()
    except NightjarError as error:
        Console(stderr=True).print(f"[red]error[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        leave(SystemExit(USER))
    except SystemExit as ending:
        leave(ending)


def _home(home: Path | None) -> Path:
    from tasks.home import home_at, home_of

    return home_at(home) if home is not None else home_of()


if __name__ == "__main__":
    main()
