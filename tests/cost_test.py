"""What a compiled program does, counted from its text: against programs whose numbers are known."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
import numpy as np
import pytest

from grpo_jax.around.planning.cost import count, hlo, instruction_runs
from grpo_jax.around.planning.cost.links import link_bytes
from grpo_jax.around.planning.cost.operations import flops

M, K, N = 32, 48, 64
ROWS = 8  # the simulated devices


def counted(function, *shapes, rounds=None):
  arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  return count(jax.jit(function).lower(*arguments).compile().as_text(), rounds)


def products(function, *shapes, **options):
  """The operations of a function in units of one product [M, K] x [K, N]."""
  return counted(function, *shapes, **options).whole.flops / (2 * M * K * N)


def scanned(body, times):
  """x -> body(body(...(x))) as a loop, whose products the compiler cannot move out."""

  def function(x, y, z):
    return lax.scan(lambda carry, _: (jnp.tanh(body(carry, y) @ z), None), x, None, times)[0]

  return function


def test_a_product_counts_two_operations_for_each_of_its_terms():
  assert products(jnp.matmul, (M, K), (K, N)) == 1
  assert products(lambda x, y: jnp.einsum("bmk,bkn->bmn", x, y), (5, M, K), (5, K, N)) == 5
  assert products(lambda x, y: jnp.tanh(x @ y) + 1, (M, K), (K, N)) == 1
  gradient = jax.grad(lambda x, y: jnp.tanh(x @ y).sum(), (0, 1))
  assert products(gradient, (M, K), (K, N)) == 3


def test_a_loop_counts_as_often_as_it_runs():
  assert products(scanned(jnp.matmul, 7), (M, K), (K, N), (N, K)) == 14


def test_loops_inside_loops_multiply():
  inner = scanned(jnp.matmul, 3)

  def outer(x, y, z):
    return lax.scan(lambda carry, _: (inner(carry, y, z), None), x, None, 5)[0]

  assert products(outer, (M, K), (K, N), (N, K)) == 30


IN_PARTS = """HloModule parts, num_partitions=8
%condition (s: (u32[], f32[4,4])) -> pred[] {
  %s = (u32[], f32[4,4]{1,0}) parameter(0)
  %eight = u32[] constant(8)
  %i = u32[] get-tuple-element(%s), index=0
  ROOT %less = pred[] compare(%i, %eight), direction=LT
}
%body (s: (u32[], f32[4,4])) -> (u32[], f32[4,4]) {
  %s = (u32[], f32[4,4]{1,0}) parameter(0)
  %i = u32[] get-tuple-element(%s), index=0
  %x = f32[4,4]{1,0} get-tuple-element(%s), index=1
  %step = u32[] constant(STEP)
  %next = u32[] add(%i, %step)
  %y = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = (u32[], f32[4,4]{1,0}) tuple(%next, %y)
}
ENTRY %main (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %start = u32[] constant(START)
  %t = (u32[], f32[4,4]{1,0}) tuple(%start, %x)
  %loop = (u32[], f32[4,4]{1,0}) while(%t), condition=%condition, body=%body
  ROOT %out = f32[4,4]{1,0} get-tuple-element(%loop), index=1
}"""


@pytest.mark.parametrize(("start", "step", "rounds"), [(0, 1, 8), (0, 2, 4), (1, 2, 4), (2, 3, 2)])
def test_a_loop_that_counts_in_larger_steps_runs_less_often(start, step, rounds):
  text = IN_PARTS.replace("START", str(start)).replace("STEP", str(step))
  assert count(text).whole.flops == rounds * 2 * 4**3


def test_of_the_branches_the_most_expensive_counts():
  def function(x, y, i):
    branches = [lambda x: x, lambda x: jnp.tanh(x @ y) @ y.T, lambda x: 2 * x]
    return lax.switch(i.astype(int), branches, x)

  result = counted(function, (M, K), (K, N), ())
  assert result.whole.flops == 4 * M * K * N
  assert any("conditional" in note for note in result.notes)


def until_negative(x, y):
  """At most 16 products, fewer if a number becomes negative. The first is number 1."""

  def goes_on(carry):
    return (carry[0] < 17) & (carry[1] >= 0).all()

  def product(carry):
    return carry[0] + 1, jnp.tanh(carry[1] @ y)

  return lax.while_loop(goes_on, product, (1, x))


def test_a_loop_that_may_end_early_counts_with_the_rounds_that_the_caller_knows():
  known = counted(until_negative, (K, K), (K, K), rounds={17: 16, 33: 5})
  assert known.whole.flops == known.open_loops.flops == 16 * 2 * K**3
  assert not known.notes
  # The counter and x change, y does not.
  unknown = counted(until_negative, (K, K), (K, K))
  assert unknown.whole.flops == 2 * K**3 and unknown.open_loops.flops == 0
  assert any("counted once" in note for note in unknown.notes)


def test_what_instructions_move_adds_up_to_what_the_program_moves():
  def looped(x, y):
    return lax.fori_loop(0, 5, lambda _, carry: jnp.tanh(carry @ y), x)

  arguments = [jax.ShapeDtypeStruct((K, K), jnp.float32)] * 2
  text = jax.jit(looped).lower(*arguments).compile().as_text()
  found = instruction_runs(text)
  assert sum(x.times * x.memory_bytes for x in found) >= 5 * 3 * 4 * K * K
  whole = count(text).whole.memory_bytes
  np.testing.assert_allclose(sum(x.times * x.memory_bytes for x in found), whole, rtol=0.01)


def loop_free(x, y, z, indices):
  hidden = jnp.tanh(x @ y)
  rows = z[indices.astype(int)]
  return jax.nn.softmax(hidden @ rows.T), hidden.sum(0)


def test_traffic_is_that_of_xla_where_nothing_loops_but_a_lookup_reads_its_rows_alone():
  shapes = (256, 512), (512, 384), (1000, 384), (200,)
  arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  compiled = jax.jit(loop_free).lower(*arguments).compile()
  own, xla = count(compiled.as_text()).whole, compiled.cost_analysis()
  assert own.flops == 2 * 256 * 512 * 384 + 2 * 256 * 384 * 200
  rows_not_read = 4 * (1000 - 200) * 384
  np.testing.assert_allclose(own.memory_bytes, xla["bytes accessed"] - rows_not_read, rtol=0.001)


def test_a_slice_of_a_large_array_counts_as_the_slice():
  """Reads all rows once, though each of the 100 rounds has the whole array at hand."""

  def total(x):
    return lax.scan(lambda carry, row: (carry + row, None), jnp.zeros(1000), x)[0]

  def copied(x):
    def put(i, out):
      return lax.dynamic_update_index_in_dim(out, x[i] * 2, i, 0)

    return lax.fori_loop(0, 100, put, jnp.zeros((100, 1000)))

  whole = 4 * 100 * 1000
  assert whole <= counted(total, (100, 1000)).whole.memory_bytes < 5 * whole
  assert 2 * whole <= counted(copied, (100, 1000)).whole.memory_bytes < 6 * whole


@pytest.mark.parametrize(
  "collective,arrays",
  [
    (lax.psum, 2 * 7 / 8),
    (functools.partial(lax.all_gather, tiled=True), 7),
    (functools.partial(lax.psum_scatter, tiled=True), 7 / 8),
    (functools.partial(lax.all_to_all, split_axis=0, concat_axis=0, tiled=True), 7 / 8),
    (functools.partial(lax.ppermute, perm=[(i, (i + 1) % ROWS) for i in range(ROWS)]), 1),
  ],
  ids=["psum", "all_gather", "psum_scatter", "all_to_all", "ppermute"],
)
def test_collectives_send_what_a_ring_sends(collective, arrays):
  """`arrays` counts arrays of one device, of [16, 1000] float32."""
  mesh = jax.make_mesh((ROWS,), ("x",), axis_types=(AxisType.Auto,))
  rows = PartitionSpec("x")

  def function(x):
    return collective(x, "x")

  mapped = jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
  assert counted(mapped, (ROWS * 16, 1000)).whole.link_bytes == arrays * 4 * 16 * 1000


def one_instruction(operands, line):
  """The last instruction of a computation, and the computation."""
  parameters = [f"  %p{i} = {shape} parameter({i})" for i, shape in enumerate(operands)]
  lines = ["HloModule m, num_partitions=8", "ENTRY %main () -> f32[] {", *parameters, line, "}"]
  module = hlo.parse("\n".join(lines))
  computation = module.computations[module.entry]
  return computation.root, computation


@pytest.mark.parametrize(
  "operands,line,terms",
  [
    (  # a batch of 4 x 4 products, as the compiler for TPUs writes it
      ("bf16[4,4,8,64]{3,2,1,0}", "bf16[4,4,64,32]{3,2,1,0:T(8,128)(2,1)S(1)}"),
      "  ROOT %c = f32[4,4,8,32]{3,2,1,0} convolution(%p0, %p1), window={size=4x4 stride=3x3"
      " lhs_dilate=4x4}, dim_labels=01bf_01io->01bf",
      4 * 4 * 8 * 64 * 32,
    ),
    (  # 4 products side by side, written with padding
      ("bf16[32,255,512,1]{2,1,0,3}", "bf16[4,64,512,1]{2,1,0,3}"),
      "  ROOT %c = bf16[32,255,4,64]{3,1,2,0} convolution(%p0, %p1), window={size=1x4 pad=0_0x3_3"
      " rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f",
      32 * 255 * 512 * 4 * 64,
    ),
    (
      ("bf16[256,512]{1,0}", "bf16[2048,512]{1,0}"),
      "  ROOT %c = bf16[256,2048]{1,0} convolution(%p0, %p1), dim_labels=bf_oi->bf",
      256 * 512 * 2048,
    ),
  ],
  ids=["dilated", "padded", "plain"],
)
def test_products_that_a_tpu_writes_as_convolutions_count_their_terms(operands, line, terms):
  assert flops(*one_instruction(operands, line)) == 2 * terms


@pytest.mark.parametrize(
  "groups,size",
  [
    ("{{0,1},{2,3},{4,5},{6,7}}", 2),
    ("[2,4]<=[8]", 4),
    ("mesh['a'=2,'b'=4] {'b'}", 4),
    ("mesh['a'=2,'b'=4] {'a','b'}", 8),
    ("{}", 8),
  ],
)
def test_all_ways_to_write_a_group_of_devices_are_read(groups, size):
  line = f"  ROOT %a = f32[100] all-reduce-start(%p0), replica_groups={groups}, to_apply=%sum"
  instruction, computation = one_instruction(["f32[100]{0:T(128)}"], line)
  assert link_bytes(instruction, computation, devices=8) == 2 * 400 * (size - 1) / size


def test_what_lies_in_a_memory_of_the_chip_is_no_traffic():
  instruction, _ = one_instruction(["f32[]"], "  ROOT %t = (f32[8]{0:S(1)}, bf16[4]{0}) tuple(%p0)")
  assert (instruction.bytes, instruction.main_bytes) == (40, 8)


def test_a_kernel_counts_what_it_declares():
  text = """HloModule m
ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %k = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", backend_config={COST}
  ROOT %u = f32[8]{0} custom-call(%k), custom_call_target="unknown"
}"""
  estimate = '{"custom_call_config":{"cost_estimate":{"flops":"1000","bytes_accessed":"500"}}}'
  result = count(text.replace("{COST}", estimate))
  assert (result.whole.flops, result.whole.memory_bytes) == (1000, 500 + 64)
  assert result.notes == ("the operations of unknown are not counted: it does not declare them",)


def test_what_a_gpu_starts_beside_others_counts_as_what_it_does():
  """A fusion on a stream of its own, of which the result and one of 8 rows are moved."""
  text = """HloModule m
%slice (a: f32[8,100], i: s32[]) -> f32[1,100] {
  %a = f32[8,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %s = f32[1,100]{1,0} dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={1,100}
}
ENTRY %main (p: f32[8,100], n: s32[]) -> f32[1,100] {
  %p = f32[8,100]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %b = ((f32[8,100]{1,0}, s32[]), f32[1,100]{1,0}, u32[]) fusion-start(%p, %n), calls=%slice
  ROOT %e = f32[1,100]{1,0} fusion-done(%b)
}"""
  assert count(text).whole.memory_bytes == 2 * 400 + 4


def test_attention_of_cudnn_counts_the_products_under_its_mask():
  """Scores [3, 4, 5, 6] with heads of 16: two products forward, five backward, half of each."""
  config = (
    '{"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16",'
    ' "dimensions": ["3", "4", "5", "6"], "layout": {}}, "mask_type": "CAUSAL"}}'
  )
  text = """HloModule m
ENTRY %main (p: bf16[3,5,4,16]) -> bf16[3,4,5,16] {
  %p = bf16[3,5,4,16]{3,2,1,0} parameter(0)
  ROOT %k = bf16[3,4,5,16]{3,2,1,0} custom-call(%p),
}"""
  for target, products in (("__cudnn$fmhaSoftmax", 2), ("__cudnn$fmhaSoftmaxBackward", 5)):
    attributes = f' custom_call_target="{target}", backend_config={config}'
    result = count(text.replace("custom-call(%p),", f"custom-call(%p),{attributes}"))
    assert result.whole.flops == products * 3 * 4 * 5 * 6 * 16 and not result.notes


# How the compiler for TPUs writes a loop of 5 rounds, an all-gather that goes on during a product,
# and a reduce-scatter.
ON_A_TPU = """HloModule m, num_partitions=4
%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {
  %b = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[8]{0} get-tuple-element(%b), index=1
  %next = f32[8]{0} negate(%x)
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %next)
}
%condition (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[], f32[8]{0}) parameter(0)
  %end = s32[]{:T(128)} constant(7)
  %j = s32[] get-tuple-element(%c), index=0
  ROOT %lt = pred[] compare(%j, %end), direction=LT
}
%start (s: f32[8]) -> (f32[8], f32[32], u32[]) {
  %s = f32[8]{0} parameter(0)
  %g1 = f32[32]{0} all-gather(%s), replica_groups=[1,4]<=[4], frontend_attributes={chain_id="0"}
  ROOT %k1 = (f32[8]{0}, f32[32]{0}, u32[]{:S(2)}) custom-call(%g1), custom_call_target="AsyncCollectiveStart"
}
%step (q0: f32[8], q1: f32[32], q2: f32[4,4]) -> (f32[4,4], f32[8], f32[32]) {
  %q0 = f32[8]{0} parameter(0)
  %q1 = f32[32]{0} parameter(1)
  %q2 = f32[4,4]{1,0} parameter(2)
  %g2 = f32[32]{0} all-gather(%q0), replica_groups=[1,4]<=[4], frontend_attributes={chain_id="0"}
  %dot = f32[4,4]{1,0} dot(%q2, %q2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t2 = (f32[4,4]{1,0}, f32[8]{0}, f32[32]{0}) tuple(%dot, %q0, %g2)
}
%done (r0: f32[8], r1: f32[32]) -> f32[32] {
  %r0 = f32[8]{0} parameter(0)
  %r1 = f32[32]{0} parameter(1)
  %g3 = f32[32]{0} all-gather(%r0), replica_groups=[1,4]<=[4], frontend_attributes={chain_id="0"}
  ROOT %k3 = f32[32]{0} custom-call(%r0, %r1, %g3), custom_call_target="AsyncCollectiveDone"
}
%all-reduce-scatter.1 (u: f32[32]) -> f32[8] {
  %u = f32[32]{0} parameter(0)
  %sum = f32[32]{0} all-reduce(%u), replica_groups=[1,4]<=[4], to_apply=%add
  %zero = s32[] constant(0)
  ROOT %part = f32[8]{0} dynamic-slice(%sum, %zero), dynamic_slice_sizes={8}
}
ENTRY %main (p: f32[8], m: f32[4,4]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %m = f32[4,4]{1,0} parameter(1)
  %two = s32[] constant(2)
  %two.copy = s32[] copy(%two)
  %t0 = (s32[], f32[8]{0}) tuple(%two.copy, %p)
  %loop = (s32[], f32[8]{0}) while(%t0), condition=%condition, body=%body
  %x1 = f32[8]{0} get-tuple-element(%loop), index=1
  %f1 = (f32[8]{0}, f32[32]{0}, u32[]{:S(2)}) fusion(%x1), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%start
  %a = f32[8]{0} get-tuple-element(%f1), index=0
  %b1 = f32[32]{0} get-tuple-element(%f1), index=1
  %f2 = (f32[4,4]{1,0}, f32[8]{0}, f32[32]{0}) fusion(%a, %b1, %m), kind=kOutput, calls=%step
  %b2 = f32[32]{0} get-tuple-element(%f2), index=2
  %f3 = f32[32]{0} fusion(%a, %b2), kind=kCustom, calls=%done
  ROOT %f4 = f32[8]{0} fusion(%f3), kind=kCustom, calls=%all-reduce-scatter.1
}"""  # noqa: E501


def test_the_ways_of_a_tpu_count_once():
  whole = count(ON_A_TPU).whole
  assert whole.flops == 2 * 4**3
  gather, scatter = 3 / 4 * 4 * 32, 3 / 4 * 4 * 32
  assert whole.link_bytes == gather + scatter
  counter = 4 + 4  # its copy before the loop
  conditions = 5 * (4 + 4 + 1)
  loop = 5 * 2 * 4 * 8
  product = 2 * 4 * 16
  assert whole.memory_bytes == counter + conditions + loop + 4 * (8 + 32) + product + 4 * (32 + 8)


NESTED = """HloModule m, is_scheduled=true
%inner (q: f32[24,64], i: s32[]) -> f32[1,64] {
  %q = f32[24,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,64]{1,0} dynamic-slice(%q, %i, %zero), dynamic_slice_sizes={1,64}
}
%outer (p: f32[24,64], j: s32[]) -> f32[1,64] {
  %p = f32[24,64]{1,0} parameter(0)
  %j = s32[] parameter(1)
  %layer = f32[1,64]{1,0} fusion(%p, %j), kind=kLoop, calls=%inner
  ROOT %twice = f32[1,64]{1,0} add(%layer, %layer)
}
ENTRY %main (a: f32[24,64], k: s32[]) -> f32[1,64] {
  %a = f32[24,64]{1,0} parameter(0)
  %k = s32[] parameter(1)
  ROOT %f = f32[1,64]{1,0} fusion(%a, %k), kind=kOutput, calls=%outer
}"""


def test_a_slice_in_a_fusion_inside_a_fusion_is_a_slice():
  """As a decoder that scans its layers reads one layer's cache: 64 floats in, 64 out, an index."""
  counted = count(NESTED)
  assert counted.whole.memory_bytes == 4 * (64 + 64) + 4


VIEWED = """HloModule m, is_scheduled=true
%view (q: s8[24,64]) -> s8[24,64] {
  %q = s8[24,64]{1,0} parameter(0)
  ROOT %same = s8[24,64]{1,0} copy(%q)
}
%outer (p: s8[24,64], j: s32[]) -> f32[1,64] {
  %p = s8[24,64]{1,0} parameter(0)
  %j = s32[] parameter(1)
  %zero = s32[] constant(0)
  %all = s8[24,64]{1,0} fusion(%p), kind=kLoop, calls=%view
  %wide = f32[24,64]{1,0} convert(%all)
  ROOT %slice = f32[1,64]{1,0} dynamic-slice(%wide, %j, %zero), dynamic_slice_sizes={1,64}
}
%whole (p: s8[24,64]) -> f32[24,64] {
  %p = s8[24,64]{1,0} parameter(0)
  %all = s8[24,64]{1,0} fusion(%p), kind=kLoop, calls=%view
  ROOT %wide = f32[24,64]{1,0} convert(%all)
}
ENTRY %main (a: s8[24,64], k: s32[]) -> f32[24,64] {
  %a = s8[24,64]{1,0} parameter(0)
  %k = s32[] parameter(1)
  %f = f32[1,64]{1,0} fusion(%a, %k), kind=kOutput, calls=%outer
  ROOT %g = f32[24,64]{1,0} fusion(%a), kind=kLoop, calls=%whole
}"""


def test_a_slice_of_a_view_is_a_slice_and_a_view_that_is_kept_reads_all():
  """As a decoder that scans its layers reads one layer's weights of int8."""
  sliced, kept = 64 + 4 * 64 + 4, 24 * 64 * (1 + 4)
  assert count(VIEWED).whole.memory_bytes == sliced + kept
