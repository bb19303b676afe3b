package main

import (
	"context"
	"encoding/binary"
	"math"
	"net"
	"sync"

	commonv1 "example.com/astraflow/gen/astraflow/common/v1"
	dataflowv1 "example.com/astraflow/gen/astraflow/dataflow/v1"
	rolloutv1 "example.com/astraflow/gen/astraflow/rollout/v1"
	weightsv1 "example.com/astraflow/gen/astraflow/weights/v1"
	"example.com/astraflow/member"
	"example.com/astraflow/weights"
)

type trainer struct {
	member *member.Member
	run    dataflowv1.TrainerServiceClient
	source *source

	// The loop changes what KeepAlive reads.
	mutex       sync.Mutex
	nextVersion int64
	step        int64
	batch       *rolloutv1.BatchHeader
	rewards     []float32
}

func newTrainer() (*trainer, error) {
	t := &trainer{}
	joined, err := member.New(*hub, *token, t)
	if err != nil {
		return nil, err
	}
	t.member = joined
	t.run = dataflowv1.NewTrainerServiceClient(joined.Conn)
	t.source, err = serve(net.IPv4(127, 0, 0, 1), joined.TransferToken)
	return t, err
}

// train takes batches until the data ends or the run asks it to leave.
func (t *trainer) train(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := t.member.Join(ctx); err != nil {
		return err
	}
	if err := t.publish(ctx); err != nil {
		return err
	}
	open := func(ctx context.Context) (dataflowv1.TrainerService_StreamBatchesClient, error) {
		return t.run.StreamBatches(ctx, &dataflowv1.StreamBatchesRequest{WorldSize: 1, MaxOutstanding: 1})
	}
	err := member.Read(ctx, t.member, false, open, func(event *dataflowv1.StreamBatchesResponse) (bool, error) {
		return t.take(ctx, event)
	})
	if err != nil {
		return err
	}
	return t.member.Leave(ctx, "no data is left")
}

// take does what an event asks for; a batch is trained on when its last part is there.
func (t *trainer) take(ctx context.Context, event *dataflowv1.StreamBatchesResponse) (bool, error) {
	switch event := event.Event.(type) {
	case *dataflowv1.StreamBatchesResponse_Header:
		t.hold(event.Header)
		t.rewards = nil
		if event.Header.PartCount == 0 {
			return true, t.learn(ctx)
		}
	case *dataflowv1.StreamBatchesResponse_Part:
		data := event.Part.Columns["rewards"].Tensor.Data
		for ; len(data) >= 4; data = data[4:] {
			t.rewards = append(t.rewards, math.Float32frombits(binary.LittleEndian.Uint32(data)))
		}
		if event.Part.Index == t.batch.PartCount-1 {
			return true, t.learn(ctx)
		}
	case *dataflowv1.StreamBatchesResponse_Publish:
		return true, t.publish(ctx)
	case *dataflowv1.StreamBatchesResponse_Directive:
		return event.Directive.Kind == commonv1.DirectiveKind_DIRECTIVE_KIND_CONTINUE, nil
	case *dataflowv1.StreamBatchesResponse_EndOfData:
		return false, nil
	}
	return true, nil
}

// learn would change the weights here; it counts.
func (t *trainer) learn(ctx context.Context) error {
	sum := 0.0
	for _, reward := range t.rewards {
		sum += float64(reward)
	}
	t.mutex.Lock()
	t.step++
	t.mutex.Unlock()
	if err := t.publish(ctx); err != nil {
		return err
	}
	err := t.member.Call(ctx, func(ctx context.Context) error {
		_, err := t.run.AckBatch(ctx, &dataflowv1.AckBatchRequest{
			BatchId: t.batch.BatchId,
			Outcome: dataflowv1.BatchOutcome_BATCH_OUTCOME_CONSUMED,
			Step:    t.step,
			Metrics: map[string]float64{"toy/reward_mean": sum / math.Max(1, float64(len(t.rewards)))},
		})
		return err
	})
	if err == nil {
		t.hold(nil)
	}
	return err
}

// publish makes the next version, serves it, then tells of it.
func (t *trainer) publish(ctx context.Context) error {
	state := make([]byte, layout.Nbytes)
	for at := 0; at < len(state); at += 4 {
		binary.LittleEndian.PutUint32(state[at:], math.Float32bits(float32(t.nextVersion)))
	}
	digest, err := weights.StateDigest(layout, state)
	if err != nil {
		return err
	}
	info := &weightsv1.VersionInfo{
		PolicyId:      *policy,
		Version:       t.nextVersion,
		LayoutDigest:  weights.LayoutDigest(layout),
		ContentDigest: digest,
		Step:          t.step,
		Patches:       []*weightsv1.PatchInfo{t.source.add(t.nextVersion, state)},
	}
	return t.member.Call(ctx, func(ctx context.Context) error {
		answer, err := t.run.PublishVersion(ctx, &dataflowv1.PublishVersionRequest{Version: info})
		if err == nil {
			t.mutex.Lock()
			t.nextVersion = answer.NextVersion
			t.mutex.Unlock()
		}
		return err
	})
}

func (t *trainer) hold(batch *rolloutv1.BatchHeader) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.batch = batch
}

// Open registers the trainer.
func (t *trainer) Open(ctx context.Context, resume *commonv1.SessionResume) (*commonv1.Session, error) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	request := &dataflowv1.RegisterTrainerRequest{
		PolicyId:        *policy,
		Name:            "toy-trainer",
		Contract:        &commonv1.Contract{ContractVersion: 1, Software: "astraflow-go"},
		GroupsPerBatch:  2,
		WeightEndpoints: []*weightsv1.WeightEndpoint{{Endpoint: t.source.endpoint}},
		LastStep:        t.step,
		Resume:          resume,
	}
	if t.nextVersion > 0 {
		version := t.nextVersion - 1
		request.Version = &version
	}
	answer, err := t.run.RegisterTrainer(ctx, request)
	if err != nil {
		return nil, err
	}
	t.nextVersion = answer.NextVersion
	return answer.Session, nil
}

// Hold names the batch that is not acknowledged yet.
func (t *trainer) Hold(resume *commonv1.SessionResume) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if t.batch != nil {
		resume.HeldBatchIds = []string{t.batch.BatchId}
	}
}

// Load counts steps and batches.
func (t *trainer) Load() *dataflowv1.KeepAliveRequest {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	load := &commonv1.TrainerLoad{Step: t.step}
	if t.batch != nil {
		load.HeldBatchCount = 1
	}
	return &dataflowv1.KeepAliveRequest{Load: &dataflowv1.KeepAliveRequest_Trainer{Trainer: load}}
}
