// Versions of a policy: digests, whole versions out, patches in. See docs/weights.md.

import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { blake3 } from "@noble/hashes/blake3.js";
import { decompress } from "fzstd";
import { Dtype } from "../gen/astraflow/common/v1/tensor_pb.js";
import type { Layout } from "../gen/astraflow/weights/v1/layout_pb.js";
import { type Chunk, type ChunkHeader, ChunkSchema, CodecProfile, Compression, Encoding, type PatchIndex, PatchIndexSchema, type PatchInfo } from "../gen/astraflow/weights/v1/patch_pb.js";

const MASK = 2n ** 64n - 1n;
const u64 = (value: number | bigint): Uint8Array => {
  const bytes = new Uint8Array(8);
  new DataView(bytes.buffer).setBigUint64(0, BigInt.asUintN(64, BigInt(value)), true);
  return bytes;
};
export const joined = (parts: Uint8Array[]): Uint8Array => new Uint8Array(Buffer.concat(parts));
export const same = (a: Uint8Array, b: Uint8Array): boolean => Buffer.compare(a, b) === 0;

export function layoutDigest(layout: Layout): Uint8Array {
  const parts = [u64(layout.tensors.length)];
  for (const tensor of layout.tensors) {
    const name = new TextEncoder().encode(tensor.name);
    parts.push(u64(name.length), name, u64(tensor.dtype), u64(tensor.shape.length));
    parts.push(...tensor.shape.map(u64), u64(tensor.offset), u64(tensor.nbytes));
  }
  return blake3(joined([...parts, u64(layout.nbytes), u64(0)]));
}

export function chunkDigest({ header, payload }: Chunk): Uint8Array {
  const { index, offset, nbytes, dtype, encoding, compression, payloadNbytes, changedCount } = header!;
  const fields = [index, offset, nbytes, dtype, encoding, compression, payloadNbytes, changedCount];
  return blake3(joined([...fields.map(u64), u64(payload.length), payload]));
}

export const rootDigest = (index: PatchIndex): Uint8Array =>
  blake3(joined([blake3(index.sharedTables), ...index.chunkDigests]));

const BITS: Record<number, number> = { [Dtype.BF16]: 16, [Dtype.F16]: 16, [Dtype.F32]: 32, [Dtype.F64]: 64, [Dtype.I64]: 64, [Dtype.I32]: 32, [Dtype.U8]: 8 };
const bitsOf = (dtype: Dtype): number => {
  const bits = BITS[dtype];
  if (!bits) throw new Error(`dtype ${dtype} is beyond this toy`);
  return bits;
};
const load = (state: Uint8Array, at: number, size: number): bigint => {
  let bits = 0n;
  for (let i = size - 1; i >= 0; i--) bits = (bits << 8n) | BigInt(state[at + i]!);
  return bits;
};
const store = (state: Uint8Array, at: number, size: number, bits: bigint): void => {
  for (let i = 0; i < size; i++) state[at + i] = Number((bits >> BigInt(8 * i)) & 255n);
};

export function stateDigest(layout: Layout, state: Uint8Array): Uint8Array {
  let [first, second] = [0n, 0n];
  for (const tensor of layout.tensors) {
    const size = bitsOf(tensor.dtype) / 8;
    for (let at = Number(tensor.offset); at < Number(tensor.offset + tensor.nbytes); at += size) {
      let x = (BigInt(at) * 0x9e3779b97f4a7c15n + load(state, at, size) * 0xd6e8feb86659fd93n + 0x6173747261666c77n) & MASK;
      x = ((x ^ (x >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
      x = ((x ^ (x >> 27n)) * 0x94d049bb133111ebn) & MASK;
      first += x ^= x >> 31n;
      x = ((x ^ (x >> 33n)) * 0xff51afd7ed558ccdn) & MASK;
      second += x ^ (x >> 29n);
    }
  }
  return joined([u64(first & MASK), u64(second & MASK)]);
}

// A version as one DENSE chunk of one tensor, from nothing.
export function whole(layout: Layout, version: bigint, payload: Uint8Array): { chunk: Chunk; index: PatchIndex } {
  const nbytes = BigInt(payload.length);
  const dtype = layout.tensors[0]!.dtype;
  const header = { nbytes, dtype, encoding: Encoding.DENSE, compression: Compression.NONE, payloadNbytes: nbytes };
  const chunk = create(ChunkSchema, { header, payload });
  const patch: MessageInitShape<typeof PatchIndexSchema>["patch"] = { version, profile: CodecProfile.FAST, codecVersion: 3, chunkCount: 1n, payloadNbytes: nbytes, shardCount: 1 };
  const index = create(PatchIndexSchema, { patch, chunkDigests: [chunkDigest(chunk)] });
  index.patch!.rootDigest = rootDigest(index);
  return { chunk, index };
}

// Refuse a plan that the run did not announce.
export function verifyPlan(patches: PatchIndex[], announced: PatchInfo[]): void {
  for (const index of patches)
    if (!same(rootDigest(index), index.patch!.rootDigest) || !announced.some((info) => same(info.rootDigest, index.patch!.rootDigest)))
      throw new Error("a plan does not add up to a registered root");
}

export function apply(chunk: Chunk, state: Uint8Array): void {
  const header = chunk.header!;
  switch (header.encoding) {
    case Encoding.UNCHANGED: return;
    case Encoding.DENSE: return state.set(chunk.payload, Number(header.offset));
    case Encoding.SPARSE_FAST: return applySparse(header, chunk.payload, state);
    default: throw new Error(`encoding ${header.encoding} was not asked for`);
  }
}

function applySparse(header: ChunkHeader, payload: Uint8Array, state: Uint8Array): void {
  const view = new DataView(payload.buffer, payload.byteOffset, payload.length);
  const word = (number: number): number => view.getUint32(4 * number, true);
  const count = Number(header.changedCount);
  let from = 28;
  const stream = (number: number, nbytes: number): Uint8Array => {
    const packed = payload.subarray(from, (from += word(3 + number)));
    return packed.length < nbytes ? decompress(packed) : packed;
  };
  const flags = Math.ceil(count / 8);
  const [gaps, ups, marks, steps] = [stream(0, word(0)), stream(1, flags), stream(2, flags), stream(3, word(1))];
  const bits = bitsOf(header.dtype);
  const [size, sign, mask] = [bits / 8, 1n << BigInt(bits - 1), (1n << BigInt(bits)) - 1n];
  const bit = (of: Uint8Array, i: number): number => (of[i >> 3]! >> (i & 7)) & 1;
  let [gap, step, at] = [0, 0, Number(header.offset)];
  for (let i = 0; i < count; i++, at += size) {
    for (; gaps[gap] === 255; gap++) at += 255 * size;
    at += gaps[gap++]! * size;
    let units = 1n;
    if (bit(marks, i)) {
      const extra = steps[step++]!;
      units += extra < 255 ? BigInt(extra) : load(payload, (from += size) - size, size);
    }
    const old = load(state, at, size);
    const order = ((old & sign ? ~old & mask : old | sign) + (bit(ups, i) ? units : -units)) & mask;
    store(state, at, size, order & sign ? order & ~sign : ~order & mask);
  }
}
