//! Versions of a policy: digests, whole versions out, patches of the profile `fast` in. See docs/weights.md.

use crate::common::Dtype;
use crate::weights_v1::{Chunk, ChunkHeader, CodecProfile, Compression, Encoding, Layout};
use crate::weights_v1::{PatchIndex, PatchInfo};

/// Bytes that are not what the run registered.
#[derive(Debug)]
pub struct Refused(pub &'static str);

const CONTRADICTION: Refused = Refused("a payload contradicts itself");

/// The canonical form of layout.proto.
#[derive(Default)]
struct Canonical(Vec<u8>);

impl Canonical {
    fn numbers(&mut self, values: &[i64]) {
        self.0.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }

    fn bytes(&mut self, value: &[u8]) {
        self.numbers(&[value.len() as i64]);
        self.0.extend(value);
    }

    fn digest(&self) -> Vec<u8> {
        blake3::hash(&self.0).as_bytes().to_vec()
    }
}

pub fn layout_digest(layout: &Layout) -> Vec<u8> {
    let mut form = Canonical::default();
    form.numbers(&[layout.tensors.len() as i64]);
    for tensor in &layout.tensors {
        form.bytes(tensor.name.as_bytes());
        form.numbers(&[i64::from(tensor.dtype), tensor.shape.len() as i64]);
        form.numbers(&tensor.shape);
        form.numbers(&[tensor.offset, tensor.nbytes]);
    }
    form.numbers(&[layout.nbytes, i64::from(layout.adapter.is_some())]);
    if let Some(adapter) = &layout.adapter {
        form.bytes(&adapter.base_digest);
        form.bytes(adapter.base_name.as_bytes());
        form.bytes(&adapter.peft_config_json);
    }
    form.digest()
}

pub fn chunk_digest(chunk: &Chunk) -> Vec<u8> {
    let header = chunk.header.clone().unwrap_or_default();
    let mut form = Canonical::default();
    form.numbers(&[header.index, header.offset, header.nbytes, i64::from(header.dtype)]);
    form.numbers(&[i64::from(header.encoding), i64::from(header.compression)]);
    form.numbers(&[header.payload_nbytes, header.changed_count]);
    form.bytes(&chunk.payload);
    form.digest()
}

/// What a plan has to add up to.
pub fn root_digest(index: &PatchIndex) -> Vec<u8> {
    let mut form = Canonical(blake3::hash(&index.shared_tables).as_bytes().to_vec());
    form.0.extend(index.chunk_digests.iter().flatten());
    form.digest()
}

/// Sums up all elements of all tensors: 16 bytes.
pub fn state_digest(layout: &Layout, state: &[u8]) -> Result<Vec<u8>, Refused> {
    let (mut first, mut second) = (0u64, 0u64);
    for tensor in &layout.tensors {
        let size = element_size(tensor.dtype)?;
        let (from, to) = (tensor.offset as usize, (tensor.offset + tensor.nbytes) as usize);
        for at in (from..to).step_by(size) {
            let bits = load(&state[at..at + size]).wrapping_mul(0xd6e8feb86659fd93);
            let mut x = (at as u64).wrapping_mul(0x9e3779b97f4a7c15).wrapping_add(bits);
            x = x.wrapping_add(0x6173747261666c77);
            x = (x ^ x >> 30).wrapping_mul(0xbf58476d1ce4e5b9);
            x = (x ^ x >> 27).wrapping_mul(0x94d049bb133111eb);
            x ^= x >> 31;
            first = first.wrapping_add(x);
            x = (x ^ x >> 33).wrapping_mul(0xff51afd7ed558ccd);
            second = second.wrapping_add(x ^ x >> 29);
        }
    }
    Ok([first.to_le_bytes(), second.to_le_bytes()].concat())
}

fn element_size(dtype: i32) -> Result<usize, Refused> {
    use Dtype::*;
    match Dtype::from_i32(dtype) {
        Some(Bool | I8 | U8 | F8E4m3 | F8E5m2) => Ok(1),
        Some(I16 | U16 | F16 | Bf16) => Ok(2),
        Some(I32 | U32 | F32) => Ok(4),
        Some(I64 | U64 | F64) => Ok(8),
        Some(Unspecified) | None => Err(Refused("no such element type")),
    }
}

/// Makes a version that is one tensor in one DENSE chunk, from nothing: at most 4 MiB.
pub fn whole(version: i64, dtype: Dtype, payload: Vec<u8>) -> (Chunk, PatchIndex) {
    let nbytes = payload.len() as i64;
    let header = ChunkHeader {
        nbytes,
        dtype: dtype.into(),
        encoding: Encoding::Dense.into(),
        compression: Compression::None.into(),
        payload_nbytes: nbytes,
        ..Default::default()
    };
    let chunk = Chunk { header: Some(header), payload, patch_index: 0 };
    let mut index = PatchIndex { chunk_digests: vec![chunk_digest(&chunk)], ..Default::default() };
    index.patch = Some(PatchInfo {
        version,
        profile: CodecProfile::Fast.into(),
        codec_version: 3,
        root_digest: root_digest(&index),
        chunk_count: 1,
        payload_nbytes: nbytes,
        shard_count: 1,
        ..Default::default()
    });
    (chunk, index)
}

/// Writes what a verified chunk says into the flat state of its base.
pub fn apply(chunk: &Chunk, state: &mut [u8]) -> Result<(), Refused> {
    let header = chunk.header.as_ref().ok_or(CONTRADICTION)?;
    let (from, nbytes) = (usize::try_from(header.offset), usize::try_from(header.nbytes));
    let (from, nbytes) = (from.map_err(|_| CONTRADICTION)?, nbytes.map_err(|_| CONTRADICTION)?);
    let to = from.checked_add(nbytes).ok_or(CONTRADICTION)?;
    let part = state.get_mut(from..to).ok_or(CONTRADICTION)?;
    match Encoding::from_i32(header.encoding) {
        Some(Encoding::Unchanged) => Ok(()),
        Some(Encoding::Dense) if part.len() == chunk.payload.len() => {
            part.copy_from_slice(&chunk.payload);
            Ok(())
        }
        Some(Encoding::SparseFast) => apply_sparse(header, &chunk.payload, part),
        _ => Err(Refused("an encoding that was not asked for")),
    }
}

fn apply_sparse(header: &ChunkHeader, payload: &[u8], part: &mut [u8]) -> Result<(), Refused> {
    let size = element_size(header.dtype)?;
    let count = usize::try_from(header.changed_count).map_err(|_| CONTRADICTION)?;
    let mut streams = Streams::split(payload, count, size)?;
    let (sign, mask) = (1u64 << (8 * size - 1), u64::MAX >> (64 - 8 * size));
    let mut at = 0;
    for change in 0..count {
        at += streams.gap()? * size;
        let units = streams.units(change, size)?;
        let element = part.get_mut(at..at + size).ok_or(CONTRADICTION)?;
        let old = load(element);
        // Neighbours in this order are one unit of the last place apart.
        let order = if old & sign != 0 { !old & mask } else { old | sign };
        let order = order.wrapping_add(units) & mask;
        store(element, if order & sign != 0 { order & !sign } else { !order & mask });
        at += size;
    }
    Ok(())
}

/// A payload of SPARSE_FAST, taken apart.
struct Streams {
    gaps: std::vec::IntoIter<u8>,
    ups: Vec<u8>,
    marks: Vec<u8>,
    steps: std::vec::IntoIter<u8>,
    escapes: std::vec::IntoIter<u8>,
}

impl Streams {
    fn split(payload: &[u8], count: usize, size: usize) -> Result<Self, Refused> {
        if payload.len() < 28 {
            return Err(CONTRADICTION);
        }
        let word = |number: usize| load(&payload[4 * number..4 * number + 4]) as usize;
        let flags = (count + 7) / 8;
        let mut rest = &payload[28..];
        let mut stream = |number: usize, nbytes: usize| {
            let packed = rest.get(..word(3 + number)).ok_or(CONTRADICTION)?;
            rest = &rest[packed.len()..];
            unpack(packed, nbytes)
        };
        let (gaps, ups) = (stream(0, word(0))?, stream(1, flags)?);
        let (marks, steps) = (stream(2, flags)?, stream(3, word(1))?);
        if rest.len() != word(2) * size {
            return Err(CONTRADICTION);
        }
        let escapes = rest.to_vec().into_iter();
        Ok(Streams { gaps: gaps.into_iter(), ups, marks, steps: steps.into_iter(), escapes })
    }

    /// Returns how many unchanged elements stand before the next change.
    fn gap(&mut self) -> Result<usize, Refused> {
        let mut gap = 0;
        loop {
            let next = self.gaps.next().ok_or(CONTRADICTION)?;
            gap += usize::from(next);
            if next < 255 {
                return Ok(gap);
            }
        }
    }

    /// Returns the signed distance of a change, as an unsigned number that wraps around.
    fn units(&mut self, change: usize, size: usize) -> Result<u64, Refused> {
        let bit = |of: &[u8]| of[change / 8] >> (change % 8) & 1 == 1;
        let mut units = 1u64;
        if bit(&self.marks) {
            let more = self.steps.next().ok_or(CONTRADICTION)?;
            units = units.wrapping_add(match more {
                255 if self.escapes.len() < size => return Err(CONTRADICTION),
                255 => load(&self.escapes.by_ref().take(size).collect::<Vec<_>>()),
                _ => u64::from(more),
            });
        }
        Ok(if bit(&self.ups) { units } else { units.wrapping_neg() })
    }
}

/// Returns a stream as it was before compression.
fn unpack(packed: &[u8], nbytes: usize) -> Result<Vec<u8>, Refused> {
    let stream = if packed.len() < nbytes {
        zstd::bulk::decompress(packed, nbytes).map_err(|_| CONTRADICTION)?
    } else {
        packed.to_vec()
    };
    if stream.len() == nbytes {
        Ok(stream)
    } else {
        Err(CONTRADICTION)
    }
}

fn load(element: &[u8]) -> u64 {
    element.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte))
}

fn store(element: &mut [u8], bits: u64) {
    let size = element.len();
    element.copy_from_slice(&bits.to_le_bytes()[..size]);
}

#[cfg(test)]
mod tests {
    use super::*;

    // The worked example of docs/weights.md.
    const PAYLOAD: &str = "050000000200000001000000 05000000010000000100000002000000 \
                           0200ff29d2 09 0c ff01 007f";

    fn header() -> ChunkHeader {
        let (dtype, encoding) = (Dtype::Bf16.into(), Encoding::SparseFast.into());
        ChunkHeader { nbytes: 1024, dtype, encoding, changed_count: 4, ..Default::default() }
    }

    fn payload() -> Vec<u8> {
        let digits: String = PAYLOAD.split_whitespace().collect();
        (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
    }

    #[test]
    fn the_worked_example_is_decoded() {
        let mut state = [0x80, 0x3f].repeat(512);
        let chunk = Chunk { header: Some(header()), payload: payload(), patch_index: 0 };
        apply(&chunk, &mut state).unwrap();
        let element = |at: usize| [state[2 * at + 1], state[2 * at]];
        assert_eq!(element(2), [0x3f, 0x81]);
        assert_eq!(element(3), [0x3f, 0x7f]);
        assert_eq!(element(300), [0xbf, 0x80]);
        assert_eq!(element(511), [0x3f, 0x82]);
        assert_eq!(element(0), [0x3f, 0x80]);
    }

    #[test]
    fn a_damaged_payload_breaks_nothing() {
        for length in 0..payload().len() {
            let chunk = Chunk { header: Some(header()), payload: payload()[..length].into(), patch_index: 0 };
            assert!(apply(&chunk, &mut vec![0; 1024]).is_err());
        }
    }
}
