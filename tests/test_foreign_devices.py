"""Arguments that name a machine by their shardings, and no target is."""

import jax
import jax.numpy as jnp
import pytest

import stowax
from stowax._errors import ArgumentError, NothingToPlanError
from stowax._jaxprs._canonical import outline

WIDTH, LAYERS = 256, 4


def step(w, x):
    def loss(w):
        out, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, w)
        return jnp.mean(out**2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))


def specs(machine, shape=(2, 2)):
    mesh = machine.mesh(shape, ("data", "model"))
    place = lambda *names: jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(*names)
    )
    w = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32, sharding=place())
    x = jax.ShapeDtypeStruct((1024, WIDTH), jnp.float32, sharding=place("data"))
    return w, x


@pytest.mark.slow
def test_the_target_is_the_machine_that_the_arguments_are_over():
    w, x = specs(stowax.target("v5p-8"))
    plan = stowax.plan(step, w, x, budget="80%", progress=False)
    assert plan.target == "v5p-8"
    assert plan.program.compile_only
    assert plan.fits


@pytest.mark.slow
def test_what_is_compiled_ahead_is_planned_for_its_own_machine():
    w, x = specs(stowax.target("v5p-8"))
    planned = stowax.jit(step, budget="80%", progress=False, donate_argnums=0)
    memory = planned.lower(w, x).compile().memory_analysis()
    assert planned.plan.target == "v5p-8"
    taken = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert taken <= planned.plan.budget_bytes


@pytest.mark.slow
def test_a_named_target_takes_another_clients_devices():
    topology = pytest.importorskip("jax.experimental.topologies")
    theirs = topology.get_topology_desc("v5p:2x2x1", platform="tpu").devices
    mesh = jax.sharding.Mesh([[*theirs[:2]], [*theirs[2:]]], ("data", "model"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    w, x = (s.update(sharding=whole) for s in specs(stowax.target("v5p-8")))
    plan = stowax.plan(step, w, x, budget="90%", target="v5p-8", progress=False)
    assert plan.target == "v5p-8"


def test_devices_that_are_no_machine_have_to_be_named():
    w, x = specs(stowax.target("h200x8"))
    with pytest.raises(NothingToPlanError, match="Name the machine that they stand"):
        stowax.plan(step, w, x, progress=False)


@pytest.mark.slow
def test_a_step_may_ask_for_the_users_own_mesh_of_one_device():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    home = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def asking(w, x):
        scale = 0.5 if "d" in jax.typeof(x).sharding.mesh.axis_names else 1.0
        return step(w, scale * x)

    w = 0.1 * jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH))
    args = [jax.device_put(a, home) for a in (w, jnp.ones((1024, WIDTH)))]
    planned = stowax.jit(asking, target="h200", budget="90%", progress=False)
    expected, found = jax.jit(asking)(*args), planned(*args)
    assert jnp.allclose(found, expected, atol=1e-6)
    assert planned.plan is not None


def test_arguments_over_an_abstract_mesh_are_refused_by_name():
    mesh = jax.sharding.AbstractMesh((2,), ("d",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    w, x = (s.update(sharding=place) for s in specs(stowax.target("v5p-8")))
    with pytest.raises(stowax.StowaxError, match="a sharding over an abstract mesh"):
        stowax.plan(step, w, x, target="h200x8", progress=False)


def test_one_that_cannot_be_planned_for_is_lowered_as_it_is_written():
    w, x = specs(stowax.target("h200x8"))
    lines = []
    planned = stowax.jit(step, budget="80%", progress=lines.append)
    assert planned.trace(w, x).jaxpr.jaxpr.outvars
    assert planned.plan is None
    assert any("runs as jax.jit would run it" in line for line in lines)


@pytest.mark.slow
def test_what_a_plan_places_goes_to_the_arguments_own_machine():
    topology = pytest.importorskip("jax.experimental.topologies")
    theirs = topology.get_topology_desc("v5p:2x2x1", platform="tpu").devices
    mesh = jax.sharding.Mesh([[*theirs[:2]], [*theirs[2:]]], ("data", "model"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    w = jax.ShapeDtypeStruct((LAYERS, 1024, 1024), jnp.float32, sharding=whole)
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=whole)
    planned = stowax.jit(
        step,
        budget="100%",
        pin={"parameter": "offload"},
        progress=False,
        donate_argnums=0,
    )
    lowered = planned.lower(w, x)
    memory = lowered.compile().memory_analysis()
    assert memory.host_argument_size_in_bytes == LAYERS * 1024 * 1024 * 4
    # With the plan's own options of the compiler, and so in the plan's memory.
    assert stowax.inspect(lowered.compile()).memory.device.total <= (
        planned.plan.budget_bytes
    )
    assert planned.plan.program.compiler_options


def test_a_step_is_the_same_over_like_meshes_of_other_machines():
    """Made for one machine, a plan is known again on another, such as a CPU."""

    def constrained(name):
        mesh = stowax.target(name).mesh((4,), ("data",))
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        constrain = lambda x: jax.lax.with_sharding_constraint(jnp.tanh(x), place)
        spec = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=place)
        with jax.set_mesh(mesh):
            return outline(jax.jit(constrain).trace(spec).jaxpr)

    assert constrained("v5p-8") == constrained("h200x4")


def spread(mesh):
    """Weights, and a batch over the mesh's first axis."""
    place = lambda *names: jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(*names)
    )
    w = 0.1 * jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH))
    x = jax.random.normal(jax.random.key(1), (1024, WIDTH))
    return jax.device_put(w, place()), jax.device_put(x, place("data"))


KINDS = {kind.name: kind for kind in jax.sharding.AxisType}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices", "kind"),
    [
        ("h200x8", 4, "Auto"),
        ("h200", 1, "Explicit"),
        ("v5p-8", 2, "Auto"),
    ],
)
def test_this_machines_mesh_stands_in_for_one_that_is_not_there(name, devices, kind):
    mesh = jax.make_mesh(
        (devices,),
        ("data",),
        axis_types=(KINDS[kind],),
        devices=jax.devices()[:devices],
    )
    constrain = kind == "Auto"

    def constrained(w, x):
        if constrain:
            place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
            x = jax.lax.with_sharding_constraint(x, place)
        return step(w, x)

    with jax.set_mesh(mesh):
        w, x = spread(mesh)
        expected = jax.jit(constrained)(w, x)
        planned = stowax.jit(constrained, target=name, budget="70%", progress=False)
        found = planned(w, x)
        assert jnp.allclose(found, expected, atol=1e-6)
        plan = planned.plan
        assert plan.program.compile_only
        assert plan.fits
        assert plan.target == name
        specs = plan.specs(w, x)
        seen = stowax.inspect(plan.apply(constrained), *specs, target=name)
        assert seen.memory.device.total == plan.device_bytes


@pytest.mark.slow
def test_a_plan_by_stand_ins_is_known_on_the_machine_itself():
    mesh = jax.make_mesh(
        (4,), ("data",), axis_types=(KINDS["Auto"],), devices=jax.devices()[:4]
    )
    plan = stowax.plan(
        step, *spread(mesh), target="v5p-8", budget="70%", progress=False
    )
    machine = stowax.target("v5p-8")
    own = machine.mesh((4,), ("data",))
    over = lambda names: jax.sharding.NamedSharding(
        own, jax.sharding.PartitionSpec(*names)
    )
    w = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32, sharding=over(()))
    x = jax.ShapeDtypeStruct((1024, WIDTH), jnp.float32, sharding=over(("data",)))
    seen = stowax.inspect(plan.apply(step), *plan.specs(w, x), target="v5p-8")
    assert seen.memory.device.total <= plan.budget_bytes


def test_more_devices_than_the_target_has():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(KINDS["Auto"],))
    with pytest.raises(ArgumentError) as error:
        stowax.plan(step, *spread(mesh), target="h200", progress=False)
    assert str(error.value) == (
        "target: got 'h200', which has 1 device, for arrays that are spread over 8. "
        "Write 'h200x8'."
    )


def test_arrays_over_two_machines():
    machine = stowax.target("v5p-8")
    w = jax.ShapeDtypeStruct(
        (LAYERS, WIDTH, WIDTH), jnp.float32, sharding=machine.sharding()
    )
    x = jax.ShapeDtypeStruct((1024, WIDTH), jnp.float32)
    here = jax.make_mesh((1,), ("data",), (KINDS["Auto"],), devices=jax.devices()[:1])
    with (
        jax.set_mesh(here),
        pytest.raises(ArgumentError, match="arrays over v5p-8 and others, or a mesh"),
    ):
        stowax.plan(step, w, x, target="v5p-8", progress=False)
