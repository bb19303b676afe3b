package weights

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	commonv1 "example.com/astraflow/gen/astraflow/common/v1"
	weightsv1 "example.com/astraflow/gen/astraflow/weights/v1"
)

// vector is a file of tests/codec/vectors, of the profile `fast`.
type vector struct {
	Tensors []struct {
		Name, Dtype string
		Shape       []int64
		Offset      int64
	}
	StateNbytes       int64  `json:"state_nbytes"`
	Base              string `json:"base_blake3"`
	TargetStateDigest string `json:"target_state_digest"`
	RootDigest        string `json:"root_digest"`
	Chunks            []struct {
		Offset, Nbytes  int64
		Dtype, Encoding string
		ChangedCount    int64 `json:"changed_count"`
		Payload         string
	}
}

func TestEveryVectorLeadsToItsTarget(t *testing.T) {
	paths, _ := filepath.Glob(filepath.Join(os.Getenv("ASTRAFLOW_VECTORS"), "*fast.json"))
	if len(paths) == 0 {
		t.Skip("ASTRAFLOW_VECTORS names no folder with vectors")
	}
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		told := vector{}
		if err := json.Unmarshal(data, &told); err != nil {
			t.Fatal(err)
		}
		layout := told.layout()
		state, index := make([]byte, told.StateNbytes), &weightsv1.PatchIndex{}
		if told.Base != "" {
			fill(layout, state)
		}
		for _, chunk := range told.chunks(t) {
			index.ChunkDigests = append(index.ChunkDigests, ChunkDigest(chunk))
			if err := Apply(chunk, state); err != nil {
				t.Fatalf("%s: %v", path, err)
			}
		}
		digest, err := StateDigest(layout, state)
		if err != nil || hex.EncodeToString(digest) != told.TargetStateDigest {
			t.Errorf("%s: another state, %v", path, err)
		}
		if hex.EncodeToString(RootDigest(index)) != told.RootDigest {
			t.Errorf("%s: another root", path)
		}
	}
}

func TestADamagedPayloadBreaksNothing(t *testing.T) {
	gaps := []byte{2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
	header := &weightsv1.ChunkHeader{
		Nbytes:       64,
		Dtype:        commonv1.Dtype_DTYPE_BF16,
		Encoding:     weightsv1.Encoding_ENCODING_SPARSE_FAST,
		ChangedCount: 2,
	}
	for _, payload := range [][]byte{nil, gaps, bytes.Repeat([]byte{255}, 40), make([]byte, 28)} {
		if err := Apply(&weightsv1.Chunk{Header: header, Payload: payload}, make([]byte, 64)); err == nil {
			t.Errorf("%x is taken", payload)
		}
	}
}

func dtypeOf(name string) commonv1.Dtype {
	return commonv1.Dtype(commonv1.Dtype_value["DTYPE_"+strings.ToUpper(name)])
}

func (v *vector) layout() *weightsv1.Layout {
	layout := &weightsv1.Layout{Nbytes: v.StateNbytes}
	for _, tensor := range v.Tensors {
		nbytes, _ := elementSize(dtypeOf(tensor.Dtype))
		for _, length := range tensor.Shape {
			nbytes *= length
		}
		layout.Tensors = append(layout.Tensors, &weightsv1.TensorSpec{
			Name: tensor.Name, Dtype: dtypeOf(tensor.Dtype), Shape: tensor.Shape, Offset: tensor.Offset, Nbytes: nbytes,
		})
	}
	return layout
}

func (v *vector) chunks(t *testing.T) (chunks []*weightsv1.Chunk) {
	for index, chunk := range v.Chunks {
		payload, err := hex.DecodeString(chunk.Payload)
		if err != nil {
			t.Fatal(err)
		}
		chunks = append(chunks, &weightsv1.Chunk{
			Header: &weightsv1.ChunkHeader{
				Index:         int64(index),
				Offset:        chunk.Offset,
				Nbytes:        chunk.Nbytes,
				Dtype:         dtypeOf(chunk.Dtype),
				Encoding:      weightsv1.Encoding(weightsv1.Encoding_value["ENCODING_"+strings.ToUpper(chunk.Encoding)]),
				Compression:   weightsv1.Compression_COMPRESSION_NONE,
				PayloadNbytes: int64(len(payload)),
				ChangedCount:  chunk.ChangedCount,
			},
			Payload: payload,
		})
	}
	return chunks
}

// fill makes the base of the vectors, as their README says.
func fill(layout *weightsv1.Layout, state []byte) {
	for number, tensor := range layout.Tensors {
		size, _ := elementSize(tensor.Dtype)
		for i := uint64(0); i < uint64(tensor.Nbytes/size); i++ {
			bits := noise(uint64(8*number), i) & noise(uint64(8*number+1), i)
			if tensor.Dtype == commonv1.Dtype_DTYPE_I64 {
				bits &= 1023
			}
			store(state[tensor.Offset+int64(i)*size:][:size], bits)
		}
	}
}

func noise(stream, i uint64) uint64 {
	x := (i+1)*0x9e3779b97f4a7c15 + stream*0xd1342543de82ef95
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
