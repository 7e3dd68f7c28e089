"""Write tests/golden/checkpoints: small checkpoints by real TensorFlow, and what TensorFlow reads from them.

Usage: python tests/make_checkpoint_golden.py   (needs tensorflow-cpu; made with 2.21)

Each directory holds a checkpoint, and expected.npz the arrays that tf.train.load_variable returns; bfloat16, which
NumPy lacks, as the uint16 of its bits; without strings.
"""

import os
import shutil
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import numpy as np
import tensorflow as tf

GOLDEN = Path(__file__).parent / "golden" / "checkpoints"
RANDOM = np.random.default_rng(0)


def normal(*shape):
    return RANDOM.standard_normal(shape, dtype=np.float32)


def gpt2(n_vocab=11, n_ctx=6, n_embd=4, n_layer=2):
    """Variables with the names and shapes of OpenAI's."""
    c = n_embd
    variables = {"model/wte": normal(n_vocab, c), "model/wpe": normal(n_ctx, c)}
    norms = ["model/ln_f"]
    for block in (f"model/h{i}" for i in range(n_layer)):
        norms += [f"{block}/ln_1", f"{block}/ln_2"]
        linears = {"attn/c_attn": (c, 3 * c), "attn/c_proj": (c, c), "mlp/c_fc": (c, 4 * c), "mlp/c_proj": (4 * c, c)}
        for linear, (n_in, n_out) in linears.items():
            variables[f"{block}/{linear}/w"] = normal(1, n_in, n_out)
            variables[f"{block}/{linear}/b"] = normal(n_out)
    for norm in norms:
        variables |= {f"{norm}/g": normal(c), f"{norm}/b": normal(c)}
    return variables


def save(prefix, variables):
    names = sorted(variables)
    tensors = [variables[name] for name in names]
    tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=[""] * len(names), tensors=tensors)


def finish(name, prefix):
    """Name the prefix in the file `checkpoint`, unless it has been, and write expected.npz."""
    folder = GOLDEN / name
    if not (folder / "checkpoint").exists():
        lines = f'model_checkpoint_path: "{prefix}"\nall_model_checkpoint_paths: "{prefix}"\n'
        (folder / "checkpoint").write_text(lines)
    expected = {}
    for variable, _ in tf.train.list_variables(str(folder / prefix)):
        array = np.asarray(tf.train.load_variable(str(folder / prefix), variable))
        if array.dtype != object:
            expected[variable] = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
    np.savez_compressed(folder / "expected.npz", **expected)


def one_shard():
    save(str(GOLDEN / "one_shard" / "model.ckpt"), gpt2())
    finish("one_shard", "model.ckpt")


def two_shards():
    variables, prefix = gpt2(n_layer=1), str(GOLDEN / "two_shards" / "model.ckpt")
    names = sorted(variables)
    parts = []
    for shard in range(2):
        part = tf.raw_ops.ShardedFilename(basename=prefix + "_part", shard=shard, num_shards=2)
        save(part, {name: variables[name] for name in names[shard::2]})
        parts.append(part)
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=prefix)
    finish("two_shards", "model.ckpt")


def adam():
    """A fine-tuned model as TensorFlow 1 saves one: with the optimizer's slots, which lie under model/ too."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        initial = {"model/wte": normal(5, 4), "model/h0/attn/c_attn/w": normal(1, 4, 12)}
        variables = [tf.compat.v1.get_variable(n, initializer=v, use_resource=False) for n, v in initial.items()]
        loss = tf.add_n([tf.reduce_sum(v * v) for v in variables])
        step = tf.compat.v1.train.get_or_create_global_step()
        train = tf.compat.v1.train.AdamOptimizer(0.01).minimize(loss, global_step=step)
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(3):
            session.run(train)
        prefix = str(GOLDEN / "adam" / "model")
        saver = tf.compat.v1.train.Saver(save_relative_paths=True)
        saver.save(session, prefix, global_step=1000, write_meta_graph=False)
    finish("adam", "model-1000")


def dtypes():
    """All kinds of shapes and types, with offsets that aren't multiples of the items' sizes."""
    numbers = np.arange(-3, 3)
    variables = {
        "a_byte": np.array([7], np.uint8),
        "bool": numbers > 0,
        "complex64": numbers.astype(np.complex64) * 1j,
        "empty": np.zeros((0, 3), np.float32),
        "empty_int": np.zeros((2, 0), np.int64),
        "nan": np.array([0x7FC00001, 0xFF800000, 0x80000000], np.uint32).view(np.float32),
        "scalar": np.float32(1 / 3),
        "model/brain": tf.cast(normal(3, 5), tf.bfloat16),
        "model/half": normal(1, 1, 2, 3).astype(np.float16),
        "model/single": normal(2, 3),
    }
    variables |= {t: numbers.astype(t) for t in ("float64", "int8", "int16", "int32", "int64", "uint8", "uint16")}
    save(str(GOLDEN / "dtypes" / "model.ckpt"), variables)
    finish("dtypes", "model.ckpt")


def strings():
    """A type that NumPy has no like of, beside a weight."""
    variables = {"model/wte": normal(2, 3), "words": tf.constant(["once", "upon"])}
    save(str(GOLDEN / "strings" / "model.ckpt"), variables)
    finish("strings", "model.ckpt")


def sliced():
    """A variable that is stored in two slices (a partitioned variable)."""
    prefix = str(GOLDEN / "sliced" / "model.ckpt")
    whole = normal(4, 3)
    names, slices = ["model/wte", "model/wte"], ["4 3 0,2:-", "4 3 2,2:-"]
    tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=slices, tensors=[whole[:2], whole[2:]])
    finish("sliced", "model.ckpt")


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for make in (one_shard, two_shards, adam, dtypes, strings, sliced):
        (GOLDEN / make.__name__).mkdir(parents=True)
        make()
