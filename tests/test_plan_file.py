"""Plans on disk: what is written comes back, and what is damaged is refused."""

import functools
import json

import jax
import pytest

import stowax
from planned_models import arguments, plan, step_of, train
from stowax._errors import ArgumentError, PlanMismatchError

ARGS = arguments(width=64, rows=512)
INSTEAD = "Give a file that Plan.save or `stowax plan -o` wrote."


@pytest.fixture(scope="module")
def moved():
    """A plan on the CPU that recomputes something."""
    return plan(train, *ARGS, target="cpu", pin={"*": "recompute"})


@pytest.fixture(scope="module")
def unneeded():
    return plan(train, *ARGS, target="cpu")


def test_what_is_saved_comes_back(moved, unneeded, tmp_path):
    for found in (moved, unneeded):
        path = tmp_path / "plan.json"
        found.save(path)
        again = stowax.load_plan(str(path))
        assert again == found
        assert type(again) is stowax.Plan
        assert str(again) == str(found)
        text = again.apply(train).lower(*ARGS).as_text()
        assert text == found.apply(train).lower(*ARGS).as_text()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_the_schema_is_stable(moved):
    # What stands here, others read: a change of it is a change of FORMAT_VERSION.
    data = moved.to_json()
    assert data["format"] == 21
    assert list(data) == ["format", "program", "decisions", "proof", "search"]
    assert set(data["program"]) == {
        *("step", "target", "device_kind", "compile_only", "versions"),
        *("arguments", "taken_apart", "stacks", "rewritten", "donate_argnums"),
        *("compiler_options", "options", "streaming"),
    }
    assert set(data["program"]["options"]) == {
        *(
            "keep_checkpoint",
            "roll",
            "as_written",
            "segments",
            "tiles",
            "layer_blocks",
            "group",
            "row_major",
            "early_gradients",
        ),
    }
    assert set(data["program"]["streaming"]) == {
        *("lean", "late", "gradients_on_host", "least_bytes"),
    }
    assert set(data["proof"]) == {
        *(
            "fits",
            "budget_bytes",
            "host_budget_bytes",
            "host_reserve_bytes",
            "device_bytes",
            "host_bytes",
        ),
        *("step_seconds", "exposed_seconds", "in_the_way", "notes", "peak"),
    }
    assert set(data["search"]) == {
        *("outcome", "predicted_device_bytes", "model_seconds", "bound_seconds"),
        *("gap", "binding", "seconds_per_gib", "smallest_budget"),
        *("smallest_budget_is", "baselines", "trials", "pins", "forbid", "unpriced"),
        *("written", "written_predicted_bytes", "written_model_seconds"),
        *("planning_seconds", "solving_seconds"),
    }
    assert set(data["decisions"][0]) == {
        *("stack", "value", "name", "source", "role", "shape", "dtype", "count"),
        *("bytes", "decision", "reason", "travel", "pinned"),
    }
    json.dumps(data, allow_nan=False)


def test_a_plan_is_written_whole_or_not_at_all(moved, tmp_path):
    missing = tmp_path / "none" / "plan.json"
    with pytest.raises(ArgumentError) as caught:
        moved.save(missing)
    assert str(caught.value) == (
        f"path: got {str(missing)!r}, which cannot be written (No such file or "
        "directory). Give a file in a folder that exists and may be written to."
    )
    with pytest.raises(ArgumentError, match=r"cannot be written \(Is a directory\)"):
        moved.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}*"))


def test_a_missing_file(tmp_path):
    path = str(tmp_path / "plan.json")
    with pytest.raises(ArgumentError) as caught:
        stowax.load_plan(path)
    assert str(caught.value) == f"path: got {path!r}, which does not exist. {INSTEAD}"
    folder = str(tmp_path)
    with pytest.raises(ArgumentError) as caught:
        stowax.load_plan(folder)
    says = "which is no whole plan (Is a directory)"  # the path once
    assert str(caught.value) == f"path: got {folder!r}, {says}. {INSTEAD}"


def damaged(found, change):
    data = found.to_json()
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda p: json.dumps(p.to_json())[:3000], "which is no whole plan ("),
        (lambda p: "", "which is no whole plan (Expecting value"),
        (lambda p: "[1]", "which is no plan. "),
        (lambda p: '{"name": "x"}', "which is no plan. "),
        (
            lambda p: damaged(p, lambda d: d["program"].pop("stacks")),
            "which is no whole plan (program.stacks is missing). ",
        ),
        (
            lambda p: damaged(p, lambda d: d["search"].pop("gap")),
            "which is no whole plan (search.gap is missing). ",
        ),
        (
            lambda p: damaged(p, lambda d: d.update(extra=1)),
            "which is no whole plan (extra is not known). ",
        ),
        (
            lambda p: damaged(p, lambda d: d["proof"].update(budget_bytes="lots")),
            "which is no whole plan (proof.budget_bytes is 'lots'). ",
        ),
        (
            lambda p: damaged(p, lambda d: d["decisions"][0].update(decision="burn")),
            "which is no whole plan (decisions.0.decision is 'burn'). ",
        ),
        (
            lambda p: damaged(p, lambda d: d["decisions"][0].update(stack="other")),
            "which is no whole plan (decisions.0.stack is 'other'). ",
        ),
        (
            lambda p: damaged(p, lambda d: d["decisions"].insert(1, d["decisions"][0])),
            "which is no whole plan (decisions.1 is the second of value 0). ",
        ),
        (
            lambda p: damaged(p, lambda d: d["program"].update(rewritten=False)),
            "which is no whole plan (program.rewritten is False, and there are decisi",
        ),
        (
            lambda p: damaged(
                p,
                lambda d: d["program"]["arguments"][0].update(
                    memory_kind="pinned_host"
                ),
            ),
            "which is no whole plan (state is not offloaded by the decisions, and by ",
        ),
        (
            lambda p: damaged(
                p, lambda d: d["program"]["arguments"][0].update(output=-1)
            ),
            "which is no whole plan (program.arguments.0.output is -1). ",
        ),
        (
            lambda p: damaged(
                p, lambda d: d["program"]["arguments"][0].update(shard=[1])
            ),
            "which is no whole plan (program.arguments.0.shard is (1,)). ",
        ),
        (
            lambda p: damaged(
                p, lambda d: d["program"]["arguments"][0].update(order=[0, 0, 0])
            ),
            "which is no whole plan (program.arguments.0.order is (0, 0, 0)). ",
        ),
        (
            lambda p: damaged(
                p, lambda d: d["program"]["arguments"][0].update(memory_kind="x")
            ),
            "which is no whole plan (program.arguments.0.memory_kind is 'x'). ",
        ),
        (
            lambda p: damaged(p, lambda d: d["program"].update(donate_argnums=[-1])),
            "which is no whole plan (program.donate_argnums is (-1,)). ",
        ),
        (
            lambda p: damaged(p, lambda d: d["decisions"][0].update(travel="slow")),
            "which is no whole plan (decisions.0.travel is 'slow'). ",
        ),
        (lambda p: "[" * 100_000, "which is no whole plan ("),
    ],
)
def test_a_damaged_file(moved, tmp_path, content, reason):
    path = tmp_path / "plan.json"
    path.write_text(content(moved))
    with pytest.raises(ArgumentError) as caught:
        stowax.load_plan(path)
    assert str(caught.value).startswith(f"path: got {str(path)!r}, {reason}")
    assert str(caught.value).endswith(INSTEAD)


def test_a_file_of_bytes(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArgumentError, match="which is no whole plan"):
        stowax.load_plan(path)


def test_a_plan_of_an_older_format_is_refused_with_the_way_to_plan_again(
    moved, tmp_path
):
    # Until format 11 all fields stood side by side.
    data = moved.to_json()
    parts = [data.pop(part) for part in ("program", "proof", "search")]
    data = {**data, **parts[0], **parts[1], **parts[2], "format": 11}
    data["versions"] = {"stowax": "0.0.9"}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanMismatchError) as caught:
        stowax.load_plan(path)
    assert str(caught.value) == (
        f"path: {str(path)!r} has plan format 11; this stowax reads format 21. "
        "Install the stowax that wrote it (0.0.9) or plan again."
    )


@pytest.mark.parametrize(
    ("program", "version"),
    [({"versions": {"stowax": "9.9"}}, "9.9"), ({}, "unknown"), (3, "unknown")],
)
def test_a_plan_of_a_newer_format_is_refused(tmp_path, program, version):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"format": 22, "program": program}))
    with pytest.raises(PlanMismatchError) as caught:
        stowax.load_plan(path)
    assert str(caught.value) == (
        f"path: {str(path)!r} has plan format 22; this stowax reads format 21. "
        f"Install the stowax that wrote it ({version}) or plan again."
    )


def test_a_plan_for_other_arguments_is_refused(moved, unneeded):
    wide = arguments(width=128, rows=512)
    long = arguments(width=64, rows=1024)
    deep = arguments(layers=6, width=64, rows=512)
    for found in (moved, unneeded):
        for args, where, got, wanted in (
            (wide, "args[0]['down']", "float32[4,512,128]", "float32[4,256,64]"),
            (long, "args[1]", "float32[1024,64]", "float32[512,64]"),
            (deep, "args[0]['down']", "float32[6,256,64]", "float32[4,256,64]"),
        ):
            with pytest.raises(PlanMismatchError) as caught:
                found.apply(train).lower(*args)
            assert str(caught.value) == (
                f"step: {where} is {got}, and the plan was made for {wanted} "
                f"({where}). Call it as it was planned, or plan again for these "
                "arguments."
            )
        with pytest.raises(PlanMismatchError, match=r"step: args\[1\] is missing"):
            found.apply(train).lower(ARGS[0])
        with pytest.raises(PlanMismatchError, match="made for nothing there"):
            found.apply(train).lower(*ARGS, ARGS[1])


def test_a_plan_for_another_model_is_refused(moved):
    @stowax.stow
    def other(params, x):
        def body(c, w):
            return c + jax.numpy.sin(c @ w["up"]) @ w["down"], None

        return jax.numpy.mean(jax.lax.scan(body, x, params)[0])

    with pytest.raises(
        PlanMismatchError, match=r"Its operation 2 is 'sin .*', and the plan has"
    ):
        moved.apply(step_of(other)).lower(*ARGS)
    with pytest.raises(PlanMismatchError, match="it has no repeated body"):
        moved.apply(lambda params, x: other(params, x)).lower(*ARGS)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"travel": "early"}, "stored 0: 'keep early' of "),
        ({"value": 99999}, "stored 99999: 'keep' of "),
        (
            {"decision": "recompute"},
            "is not stored, and a layer's input cannot be computed again",
        ),
    ],
)
def test_a_plan_edited_into_what_cannot_be(moved, tmp_path, change, text):
    path = tmp_path / "plan.json"
    data = moved.to_json()
    (kept,) = (d for d in data["decisions"] if d["decision"] == "keep")
    kept.update(change)
    path.write_text(json.dumps(data))
    with pytest.raises(PlanMismatchError) as caught:
        stowax.load_plan(path).apply(train).lower(*ARGS)
    assert text in str(caught.value)


def test_a_decision_that_is_edited_is_in_effect(moved, tmp_path):
    path = tmp_path / "plan.json"
    data = moved.to_json()
    for decision in data["decisions"]:
        decision["decision"] = "keep"
    path.write_text(json.dumps(data))
    kept, again = (
        found.apply(train).lower(*ARGS).as_text()
        for found in (stowax.load_plan(path), moved)
    )
    assert kept.count("stablehlo.dot_general") < again.count("stablehlo.dot_general")


def test_a_plan_for_another_attached_device_is_refused(moved, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(
        damaged(moved, lambda d: d["program"].update(device_kind="TPU v5p"))
    )
    with pytest.raises(PlanMismatchError) as caught:
        stowax.load_plan(path).apply(train)
    assert str(caught.value) == (
        "plan: made for cpu (TPU v5p), and JAX runs on cpu here. Make a plan on "
        "this machine."
    )


def test_a_plan_from_a_laptop_is_in_full_effect_on_its_machine(
    moved, tmp_path, monkeypatch
):
    """Its options are for its own compiler; elsewhere they would be refused."""
    path = tmp_path / "plan.json"
    options = {"no_such_option": "1"}
    new = {"target": "v5p-8", "compile_only": True, "compiler_options": options}
    path.write_text(damaged(moved, lambda d: d["program"].update(new)))
    load = functools.partial(stowax.load_plan, compiler_options=options)
    there = load(path).apply(train)
    assert there.stowax_compiler_options == options
    args = jax.tree.map(lambda spec: jax.numpy.ones(spec.shape, spec.dtype), ARGS)
    there(*args)
    monkeypatch.setattr("stowax._plan._effect.is_here", lambda name: name == "v5p-8")
    here = load(path).apply(train)
    assert not hasattr(here, "stowax_compiler_options")
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        here(*jax.tree.map(jax.numpy.ones_like, args))
