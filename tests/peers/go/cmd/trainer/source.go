package main

import (
	"bytes"
	"context"
	"crypto/subtle"
	"net"
	"sync"

	commonv1 "example.com/astraflow/gen/astraflow/common/v1"
	weightsv1 "example.com/astraflow/gen/astraflow/weights/v1"
	"example.com/astraflow/member"
	"example.com/astraflow/weights"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
)

const elementCount = 100

// How many versions can be pulled.
const keptCount = 8

var layout = &weightsv1.Layout{
	Tensors: []*weightsv1.TensorSpec{{
		Name:   "w",
		Dtype:  commonv1.Dtype_DTYPE_F32,
		Shape:  []int64{elementCount},
		Nbytes: 4 * elementCount,
	}},
	Nbytes: 4 * elementCount,
}

// source serves the newest versions, each as a patch from nothing.
type source struct {
	weightsv1.UnimplementedTransferServiceServer
	endpoint string
	// What a caller has to show.
	secret func() string

	mutex   sync.Mutex
	chunks  map[int64]*weightsv1.Chunk
	indexes map[int64]*weightsv1.PatchIndex
}

// serve listens on a free port.
func serve(host net.IP, secret func() string) (*source, error) {
	listener, err := net.ListenTCP("tcp", &net.TCPAddr{IP: host})
	if err != nil {
		return nil, err
	}
	s := &source{
		endpoint: listener.Addr().String(),
		secret:   secret,
		chunks:   map[int64]*weightsv1.Chunk{},
		indexes:  map[int64]*weightsv1.PatchIndex{},
	}
	server := grpc.NewServer()
	weightsv1.RegisterTransferServiceServer(server, s)
	go server.Serve(listener)
	return s, nil
}

// add makes a version that can be pulled from now on.
func (s *source) add(version int64, state []byte) *weightsv1.PatchInfo {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.chunks[version], s.indexes[version] = weights.Whole(version, commonv1.Dtype_DTYPE_F32, state)
	delete(s.chunks, version-keptCount)
	delete(s.indexes, version-keptCount)
	return s.indexes[version].Patch
}

// Pull sends the plan, then what of it the puller lacks.
func (s *source) Pull(request *weightsv1.PullRequest, stream weightsv1.TransferService_PullServer) error {
	if err := s.admit(stream.Context()); err != nil {
		return err
	}
	chunk, index := s.find(request.Spec.GetVersion())
	if index == nil {
		return member.Refuse(codes.NotFound, "VERSION_UNKNOWN", "not held here")
	}
	chunks := []*weightsv1.Chunk{chunk}
	for _, held := range request.Spec.HaveChunks {
		if bytes.Equal(held.RootDigest, index.Patch.RootDigest) {
			chunks = nil
		}
	}
	plan := &weightsv1.TransferPlan{Patches: []*weightsv1.PatchIndex{index}, ChunkCount: int64(len(chunks))}
	for _, chunk := range chunks {
		plan.PayloadNbytes += chunk.Header.PayloadNbytes
	}
	if err := stream.Send(&weightsv1.PullResponse{Item: &weightsv1.PullResponse_Plan{Plan: plan}}); err != nil {
		return err
	}
	for _, chunk := range chunks {
		item := &weightsv1.PullResponse_Chunk{Chunk: chunk}
		if err := stream.Send(&weightsv1.PullResponse{Item: item}); err != nil {
			return err
		}
	}
	return nil
}

// GetLayout hands out the one layout there is.
func (s *source) GetLayout(
	ctx context.Context, request *weightsv1.GetLayoutRequest,
) (*weightsv1.GetLayoutResponse, error) {
	if err := s.admit(ctx); err != nil {
		return nil, err
	}
	if !bytes.Equal(request.LayoutDigest, weights.LayoutDigest(layout)) {
		return nil, member.Refuse(codes.NotFound, "LAYOUT_UNKNOWN", "not held here")
	}
	return &weightsv1.GetLayoutResponse{Layout: layout}, nil
}

func (s *source) admit(ctx context.Context) error {
	told, _ := metadata.FromIncomingContext(ctx)
	given, secret := told.Get("astraflow-transfer-bin"), s.secret()
	if len(given) != 1 || secret == "" || subtle.ConstantTimeCompare([]byte(given[0]), []byte(secret)) != 1 {
		return member.Refuse(codes.Unauthenticated, "TOKEN_INVALID", "join the run")
	}
	return nil
}

func (s *source) find(version int64) (*weightsv1.Chunk, *weightsv1.PatchIndex) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.chunks[version], s.indexes[version]
}
