package weights

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sort"
	"sync"
	"time"

	weightsv1 "example.com/astraflow/gen/astraflow/weights/v1"
	"example.com/astraflow/member"
	"google.golang.org/grpc/metadata"
)

// Version is a verified version of a policy. Nobody writes to it.
type Version struct {
	Number int64
	Layout *weightsv1.Layout
	// State has all tensors, where the layout says.
	State []byte
}

// Tensor returns the bytes of a tensor; nil: there is none of that name.
func (v *Version) Tensor(name string) []byte {
	for _, tensor := range v.Layout.Tensors {
		if tensor.Name == name {
			return v.State[tensor.Offset : tensor.Offset+tensor.Nbytes]
		}
	}
	return nil
}

// Replica is what a RaaS holds of a policy: one verified version, and the way to the next.
type Replica struct {
	mutex   sync.Mutex
	version *Version
	changed chan struct{}
}

// NewReplica holds nothing yet.
func NewReplica() *Replica { return &Replica{changed: make(chan struct{})} }

// Version returns what is held; nil: nothing.
func (r *Replica) Version() *Version {
	version, _ := r.look()
	return version
}

// WaitFor returns a version that is no older than min.
func (r *Replica) WaitFor(ctx context.Context, min int64) (*Version, error) {
	for {
		version, changed := r.look()
		if version != nil && version.Number >= min {
			return version, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Pull takes a version from a source. Anew: not as patches of what is held. A version that does not
// verify leaves the one before.
func (r *Replica) Pull(
	ctx context.Context, info *weightsv1.VersionInfo, from Source, announced []*weightsv1.PatchInfo, anew bool,
) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	ctx = metadata.AppendToOutgoingContext(ctx, "astraflow-transfer-bin", from.Token)
	conn, err := member.Dial(from.Endpoint)
	if err != nil {
		return err
	}
	defer conn.Close()
	source := weightsv1.NewTransferServiceClient(conn)
	next, spec, err := r.begin(ctx, source, info, anew)
	if err != nil {
		return err
	}
	if err := receive(ctx, source, spec, announced, next.State); err != nil {
		return err
	}
	digest, err := StateDigest(next.Layout, next.State)
	if err != nil {
		return err
	}
	if !bytes.Equal(digest, info.ContentDigest) {
		return errors.New("another state than the registered one")
	}
	r.take(next)
	return nil
}

// Source is where a version can be had.
type Source struct{ Endpoint, Token string }

// begin makes the version to be filled: what is held, or zeros.
func (r *Replica) begin(
	ctx context.Context, source weightsv1.TransferServiceClient, info *weightsv1.VersionInfo, anew bool,
) (*Version, *weightsv1.TransferSpec, error) {
	held := r.Version()
	next := &Version{Number: info.Version}
	spec := &weightsv1.TransferSpec{
		PolicyId:     info.PolicyId,
		Version:      info.Version,
		LayoutDigest: info.LayoutDigest,
		Profiles:     []weightsv1.CodecProfile{weightsv1.CodecProfile_CODEC_PROFILE_FAST},
	}
	if held != nil && !anew {
		spec.BaseVersion = &held.Number
		next.Layout, next.State = held.Layout, append([]byte(nil), held.State...)
		return next, spec, nil
	}
	answer, err := source.GetLayout(ctx, &weightsv1.GetLayoutRequest{LayoutDigest: info.LayoutDigest})
	if err != nil {
		return nil, nil, err
	}
	if !bytes.Equal(LayoutDigest(answer.Layout), info.LayoutDigest) {
		return nil, nil, errors.New("another layout than the registered one")
	}
	next.Layout, next.State = answer.Layout, make([]byte, answer.Layout.Nbytes)
	return next, spec, nil
}

// receive applies verified chunks, patch by patch: they come in any order.
func receive(
	ctx context.Context,
	source weightsv1.TransferServiceClient,
	spec *weightsv1.TransferSpec,
	announced []*weightsv1.PatchInfo,
	state []byte,
) error {
	stream, err := source.Pull(ctx, &weightsv1.PullRequest{Spec: spec})
	if err != nil {
		return err
	}
	var plan *weightsv1.TransferPlan
	var chunks []*weightsv1.Chunk
	for {
		answer, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return applyAll(chunks, state)
		}
		if err != nil {
			return err
		}
		switch item := answer.Item.(type) {
		case *weightsv1.PullResponse_Plan:
			plan = item.Plan
			err = verifyPlan(plan, announced)
		case *weightsv1.PullResponse_Chunk:
			chunks = append(chunks, item.Chunk)
			err = verifyChunk(item.Chunk, plan)
		}
		if err != nil {
			return fmt.Errorf("version %d: %w", spec.Version, err)
		}
	}
}

func applyAll(chunks []*weightsv1.Chunk, state []byte) error {
	sort.SliceStable(chunks, func(i, j int) bool { return chunks[i].PatchIndex < chunks[j].PatchIndex })
	for _, chunk := range chunks {
		if err := Apply(chunk, state); err != nil {
			return err
		}
	}
	return nil
}

func (r *Replica) look() (*Version, <-chan struct{}) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.version, r.changed
}

func (r *Replica) take(version *Version) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.version = version
	close(r.changed)
	r.changed = make(chan struct{})
}
