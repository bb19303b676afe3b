// Package weights has the digests of docs/weights.md, versions made whole, and a decoder of the profile
// `fast`.
package weights

import (
	"bytes"
	"encoding/binary"
	"fmt"

	commonv1 "example.com/astraflow/gen/astraflow/common/v1"
	weightsv1 "example.com/astraflow/gen/astraflow/weights/v1"
	"lukechampine.com/blake3"
)

// canonical writes the canonical form of layout.proto.
type canonical []byte

func (c *canonical) number(value int64) {
	*c = append(*c, make([]byte, 8)...)
	binary.LittleEndian.PutUint64((*c)[len(*c)-8:], uint64(value))
}

func (c *canonical) bytes(value []byte) {
	c.number(int64(len(value)))
	*c = append(*c, value...)
}

func (c *canonical) digest() []byte {
	digest := blake3.Sum256(*c)
	return digest[:]
}

// LayoutDigest is the BLAKE3 of the layout's canonical form.
func LayoutDigest(layout *weightsv1.Layout) []byte {
	form := canonical{}
	form.number(int64(len(layout.Tensors)))
	for _, tensor := range layout.Tensors {
		form.bytes([]byte(tensor.Name))
		form.number(int64(tensor.Dtype))
		form.number(int64(len(tensor.Shape)))
		for _, length := range tensor.Shape {
			form.number(length)
		}
		form.number(tensor.Offset)
		form.number(tensor.Nbytes)
	}
	form.number(layout.Nbytes)
	if adapter := layout.Adapter; adapter == nil {
		form.number(0)
	} else {
		form.number(1)
		form.bytes(adapter.BaseDigest)
		form.bytes([]byte(adapter.BaseName))
		form.bytes(adapter.PeftConfigJson)
	}
	return form.digest()
}

// ChunkDigest is the BLAKE3 over header and payload.
func ChunkDigest(chunk *weightsv1.Chunk) []byte {
	header, form := chunk.Header, canonical{}
	form.number(header.Index)
	form.number(header.Offset)
	form.number(header.Nbytes)
	form.number(int64(header.Dtype))
	form.number(int64(header.Encoding))
	form.number(int64(header.Compression))
	form.number(header.PayloadNbytes)
	form.number(header.ChangedCount)
	form.bytes(chunk.Payload)
	return form.digest()
}

// RootDigest is what a plan has to add up to.
func RootDigest(index *weightsv1.PatchIndex) []byte {
	tables := blake3.Sum256(index.SharedTables)
	form := canonical(tables[:])
	for _, digest := range index.ChunkDigests {
		form = append(form, digest...)
	}
	return form.digest()
}

// StateDigest sums up all elements of all tensors: 16 bytes.
func StateDigest(layout *weightsv1.Layout, state []byte) ([]byte, error) {
	var first, second uint64
	for _, tensor := range layout.Tensors {
		size, err := elementSize(tensor.Dtype)
		if err != nil {
			return nil, err
		}
		for at := tensor.Offset; at < tensor.Offset+tensor.Nbytes; at += size {
			x := uint64(at)*0x9e3779b97f4a7c15 + load(state[at:at+size])*0xd6e8feb86659fd93 + 0x6173747261666c77
			x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
			x = (x ^ x>>27) * 0x94d049bb133111eb
			x ^= x >> 31
			first += x
			x = (x ^ x>>33) * 0xff51afd7ed558ccd
			second += x ^ x>>29
		}
	}
	form := canonical{}
	form.number(int64(first))
	form.number(int64(second))
	return form, nil
}

// Whole makes a version that is one tensor in one DENSE chunk, from nothing: at most 4 MiB.
func Whole(version int64, dtype commonv1.Dtype, payload []byte) (*weightsv1.Chunk, *weightsv1.PatchIndex) {
	nbytes := int64(len(payload))
	header := &weightsv1.ChunkHeader{
		Nbytes:        nbytes,
		Dtype:         dtype,
		Encoding:      weightsv1.Encoding_ENCODING_DENSE,
		Compression:   weightsv1.Compression_COMPRESSION_NONE,
		PayloadNbytes: nbytes,
	}
	chunk := &weightsv1.Chunk{Header: header, Payload: payload}
	patch := &weightsv1.PatchInfo{
		Version:       version,
		Profile:       weightsv1.CodecProfile_CODEC_PROFILE_FAST,
		CodecVersion:  3,
		ChunkCount:    1,
		PayloadNbytes: nbytes,
		ShardCount:    1,
	}
	index := &weightsv1.PatchIndex{Patch: patch, ChunkDigests: [][]byte{ChunkDigest(chunk)}}
	patch.RootDigest = RootDigest(index)
	return chunk, index
}

// verifyPlan refuses a plan that the run did not announce.
func verifyPlan(plan *weightsv1.TransferPlan, announced []*weightsv1.PatchInfo) error {
	for _, index := range plan.Patches {
		root := index.Patch.RootDigest
		if !bytes.Equal(RootDigest(index), root) || !isAnnounced(root, announced) {
			return fmt.Errorf("a plan does not add up to a registered root")
		}
	}
	return nil
}

func isAnnounced(root []byte, announced []*weightsv1.PatchInfo) bool {
	for _, patch := range announced {
		if bytes.Equal(patch.RootDigest, root) {
			return true
		}
	}
	return false
}

func verifyChunk(chunk *weightsv1.Chunk, plan *weightsv1.TransferPlan) error {
	at, index := int(chunk.PatchIndex), int(chunk.GetHeader().GetIndex())
	if at < 0 || at >= len(plan.GetPatches()) || index < 0 || index >= len(plan.Patches[at].ChunkDigests) {
		return fmt.Errorf("a chunk that is not of the plan")
	}
	if !bytes.Equal(ChunkDigest(chunk), plan.Patches[at].ChunkDigests[index]) {
		return fmt.Errorf("a chunk has another digest")
	}
	return nil
}
