package weights

import (
	"encoding/binary"
	"errors"
	"fmt"

	commonv1 "example.com/astraflow/gen/astraflow/common/v1"
	weightsv1 "example.com/astraflow/gen/astraflow/weights/v1"
	"github.com/klauspost/compress/zstd"
)

var errContradiction = errors.New("a payload contradicts itself")

var elementSizes = map[commonv1.Dtype]int64{
	commonv1.Dtype_DTYPE_BF16: 2, commonv1.Dtype_DTYPE_F16: 2, commonv1.Dtype_DTYPE_F32: 4,
	commonv1.Dtype_DTYPE_F64: 8, commonv1.Dtype_DTYPE_F8_E4M3: 1, commonv1.Dtype_DTYPE_F8_E5M2: 1,
	commonv1.Dtype_DTYPE_BOOL: 1, commonv1.Dtype_DTYPE_U8: 1, commonv1.Dtype_DTYPE_I8: 1,
	commonv1.Dtype_DTYPE_U16: 2, commonv1.Dtype_DTYPE_I16: 2, commonv1.Dtype_DTYPE_U32: 4,
	commonv1.Dtype_DTYPE_I32: 4, commonv1.Dtype_DTYPE_U64: 8, commonv1.Dtype_DTYPE_I64: 8,
}

func elementSize(dtype commonv1.Dtype) (int64, error) {
	size, ok := elementSizes[dtype]
	if !ok {
		return 0, fmt.Errorf("no such element type: %v", dtype)
	}
	return size, nil
}

// Apply writes what a verified chunk says into the flat state of its base.
func Apply(chunk *weightsv1.Chunk, state []byte) error {
	header := chunk.Header
	if header.Offset < 0 || header.Nbytes < 0 || header.Offset+header.Nbytes > int64(len(state)) {
		return errContradiction
	}
	part := state[header.Offset : header.Offset+header.Nbytes]
	switch header.Encoding {
	case weightsv1.Encoding_ENCODING_UNCHANGED:
		return nil
	case weightsv1.Encoding_ENCODING_DENSE:
		if copy(part, chunk.Payload) != len(part) {
			return errContradiction
		}
		return nil
	case weightsv1.Encoding_ENCODING_SPARSE_FAST:
		return applySparse(header, chunk.Payload, part)
	}
	return fmt.Errorf("%v was not asked for", header.Encoding)
}

// sparse is a payload of SPARSE_FAST, taken apart.
type sparse struct {
	gaps, ups, marks, steps, escapes []byte
}

func applySparse(header *weightsv1.ChunkHeader, payload, part []byte) error {
	size, err := elementSize(header.Dtype)
	if err != nil {
		return err
	}
	streams, err := split(payload, header.ChangedCount, size)
	if err != nil {
		return err
	}
	sign, mask := uint64(1)<<(8*size-1), ^uint64(0)>>(64-8*size)
	at := int64(0)
	for i := int64(0); i < header.ChangedCount; i++ {
		gap, err := streams.gap()
		if err != nil {
			return err
		}
		units, err := streams.units(i, size)
		if err != nil {
			return err
		}
		at += gap * size
		if at+size > int64(len(part)) {
			return errContradiction
		}
		order := load(part[at : at+size])
		// Neighbours in this order are one unit of the last place apart.
		if order&sign != 0 {
			order = ^order & mask
		} else {
			order |= sign
		}
		if order = (order + units) & mask; order&sign != 0 {
			order &^= sign
		} else {
			order = ^order & mask
		}
		store(part[at:at+size], order)
		at += size
	}
	return nil
}

func split(payload []byte, count, size int64) (*sparse, error) {
	if len(payload) < 28 || count < 0 {
		return nil, errContradiction
	}
	word := func(number int) int64 { return int64(binary.LittleEndian.Uint32(payload[4*number:])) }
	flags := (count + 7) / 8
	nbytes := [4]int64{word(0), flags, flags, word(1)}
	streams, rest := [4][]byte{}, payload[28:]
	for i := range streams {
		packed := word(3 + i)
		if packed > int64(len(rest)) {
			return nil, errContradiction
		}
		stream, err := unpack(rest[:packed], nbytes[i])
		if err != nil {
			return nil, err
		}
		streams[i], rest = stream, rest[packed:]
	}
	if int64(len(rest)) != word(2)*size {
		return nil, errContradiction
	}
	return &sparse{gaps: streams[0], ups: streams[1], marks: streams[2], steps: streams[3], escapes: rest}, nil
}

// unpack returns a stream as it was before compression.
func unpack(packed []byte, nbytes int64) ([]byte, error) {
	if int64(len(packed)) < nbytes {
		reader, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1))
		if err != nil {
			return nil, err
		}
		defer reader.Close()
		if packed, err = reader.DecodeAll(packed, nil); err != nil {
			return nil, err
		}
	}
	if int64(len(packed)) != nbytes {
		return nil, errContradiction
	}
	return packed, nil
}

// gap returns how many unchanged elements stand before the next change.
func (s *sparse) gap() (int64, error) {
	for gap := int64(0); len(s.gaps) > 0; {
		next := s.gaps[0]
		s.gaps = s.gaps[1:]
		gap += int64(next)
		if next < 255 {
			return gap, nil
		}
	}
	return 0, errContradiction
}

// units returns the signed distance of change i, as an unsigned number that wraps around.
func (s *sparse) units(i, size int64) (uint64, error) {
	units := uint64(1)
	if s.marks[i/8]>>(i%8)&1 == 1 {
		if len(s.steps) == 0 {
			return 0, errContradiction
		}
		more := uint64(s.steps[0])
		s.steps = s.steps[1:]
		if more == 255 {
			if int64(len(s.escapes)) < size {
				return 0, errContradiction
			}
			more = load(s.escapes[:size])
			s.escapes = s.escapes[size:]
		}
		units += more
	}
	if s.ups[i/8]>>(i%8)&1 == 1 {
		return units, nil
	}
	return -units, nil
}

func load(element []byte) uint64 {
	bits := uint64(0)
	for i := len(element) - 1; i >= 0; i-- {
		bits = bits<<8 | uint64(element[i])
	}
	return bits
}

func store(element []byte, bits uint64) {
	for i := range element {
		element[i] = byte(bits >> (8 * i))
	}
}
