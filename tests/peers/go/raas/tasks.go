package raas

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"time"

	commonv1 "example.com/astraflow/gen/astraflow/common/v1"
	dataflowv1 "example.com/astraflow/gen/astraflow/dataflow/v1"
	rolloutv1 "example.com/astraflow/gen/astraflow/rollout/v1"
	"example.com/astraflow/member"
	"example.com/astraflow/weights"
)

// takeTasks works on what the run sends, until it asks the node to leave: at once, or when all is closed.
func (n *Node) takeTasks(ctx context.Context) error {
	open := func(ctx context.Context) (dataflowv1.RaasService_StreamTasksClient, error) {
		stream, err := n.run.StreamTasks(ctx)
		if err == nil {
			go n.steer(stream)
		}
		return stream, err
	}
	asked := commonv1.DirectiveKind_DIRECTIVE_KIND_CONTINUE
	err := member.Read(ctx, n.member, true, open, func(event *dataflowv1.StreamTasksResponse) (bool, error) {
		switch event := event.Event.(type) {
		case *dataflowv1.StreamTasksResponse_Task:
			n.begin(event.Task)
			go n.work(ctx, event.Task)
		case *dataflowv1.StreamTasksResponse_Directive:
			asked = event.Directive.Kind
			return asked == commonv1.DirectiveKind_DIRECTIVE_KIND_CONTINUE, nil
		}
		return true, nil
	})
	if err != nil || asked == commonv1.DirectiveKind_DIRECTIVE_KIND_STOP {
		return err
	}
	n.mutex.Lock()
	defer n.mutex.Unlock()
	for len(n.tasks) > 0 {
		n.idle.Wait()
	}
	return nil
}

// steer opens the stream with the credit, and gives back what cannot be done. On a new stream all is
// said again: of a task that is not held it changes nothing.
func (n *Node) steer(stream dataflowv1.RaasService_StreamTasksClient) {
	credit := &dataflowv1.TaskCredit{MaxOutstanding: n.settings.Capacity}
	open := &dataflowv1.StreamTasksRequest_Open{Open: &dataflowv1.TaskOpen{Credit: credit}}
	// Where sending fails, reading does, and says why.
	if stream.Send(&dataflowv1.StreamTasksRequest{Request: open}) != nil {
		return
	}
	for from := 0; ; {
		var nacks []*dataflowv1.TaskNack
		nacks, from = n.nacksFrom(from)
		for _, nack := range nacks {
			request := &dataflowv1.StreamTasksRequest_Nack{Nack: nack}
			if stream.Send(&dataflowv1.StreamTasksRequest{Request: request}) != nil {
				return
			}
		}
		select {
		case <-n.nacked:
		case <-stream.Context().Done():
			return
		}
	}
}

// nacksFrom returns those from a count on, and the count to go on from.
func (n *Node) nacksFrom(from int) ([]*dataflowv1.TaskNack, int) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	if first := n.nackCount - len(n.nacks); from < first {
		from = first
	}
	return append([]*dataflowv1.TaskNack(nil), n.nacks[len(n.nacks)-(n.nackCount-from):]...), n.nackCount
}

func (n *Node) begin(task *rolloutv1.RolloutTask) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.tasks[task.TaskId] = true
}

func (n *Node) end(taskID string) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	delete(n.tasks, taskID)
	n.idle.Broadcast()
}

// work samples all rollouts of a task; the result comes last.
func (n *Node) work(ctx context.Context, task *rolloutv1.RolloutTask) {
	wanted := task.Versions[n.settings.Policy]
	version, err := n.replica.WaitFor(ctx, wanted.GetMin())
	if err != nil {
		return
	}
	switch {
	case task.Deadline != nil && task.Deadline.AsTime().Before(time.Now()):
		n.giveBack(task, commonv1.Reason_REASON_TASK_EXPIRED)
		return
	case wanted != nil && wanted.Max != nil && version.Number > *wanted.Max:
		n.giveBack(task, commonv1.Reason_REASON_VERSION_NOT_SERVED)
		return
	}
	for _, index := range task.SampleIndexes {
		rollout := n.rollout(task, index, version)
		n.outbox.put(&dataflowv1.RolloutItem{Item: &dataflowv1.RolloutItem_Rollout{Rollout: rollout}})
	}
	result := &rolloutv1.TaskResult{TaskId: task.TaskId, RolloutCount: int32(len(task.SampleIndexes))}
	n.outbox.put(&dataflowv1.RolloutItem{Item: &dataflowv1.RolloutItem_Result{Result: result}})
}

func (n *Node) giveBack(task *rolloutv1.RolloutTask, reason commonv1.Reason) {
	nack := &dataflowv1.TaskNack{TaskId: task.TaskId, Failure: &commonv1.Failure{Reason: reason}}
	n.mutex.Lock()
	n.nackCount++
	n.nacks = append(n.nacks, nack)
	// No more than these are out at once: whatever is older has arrived.
	if extra := len(n.nacks) - int(n.settings.Capacity); extra > 0 {
		n.nacks = n.nacks[extra:]
	}
	n.mutex.Unlock()
	n.end(task.TaskId)
	select {
	case n.nacked <- struct{}{}:
	default:
	}
}

func (n *Node) rollout(task *rolloutv1.RolloutTask, index int32, version *weights.Version) *rolloutv1.Rollout {
	n.mutex.Lock()
	n.rollouts++
	id := fmt.Sprintf("rollout-%d-%d", os.Getpid(), n.rollouts)
	n.mutex.Unlock()
	sample := n.settings.Answer(task, version)
	return &rolloutv1.Rollout{
		RolloutId:      id,
		TaskId:         task.TaskId,
		GroupId:        task.GroupId,
		SampleIndex:    index,
		Outcome:        rolloutv1.Outcome_OUTCOME_SCORED,
		Reward:         &sample.Reward,
		Trajectories:   []*rolloutv1.Trajectory{n.trajectory(id, task, sample, version.Number)},
		PolicyVersions: map[string]int64{n.settings.Policy: version.Number},
	}
}

func (n *Node) trajectory(
	id string, task *rolloutv1.RolloutTask, sample Sample, version int64,
) *rolloutv1.Trajectory {
	length := len(sample.Tokens)
	count := length - sample.PromptLength
	mask, logprobs := make([]bool, length), make([]float32, length)
	copy(logprobs[sample.PromptLength:], sample.Logprobs)
	for at := sample.PromptLength; at < length; at++ {
		mask[at] = true
	}
	return &rolloutv1.Trajectory{
		TrajectoryId: id + "-0",
		PolicyId:     n.settings.Policy,
		Tokens:       tensor(commonv1.Dtype_DTYPE_I32, length, sample.Tokens),
		SampledMask:  tensor(commonv1.Dtype_DTYPE_BOOL, length, mask),
		Logprobs:     tensor(commonv1.Dtype_DTYPE_F32, length, logprobs),
		VersionSpans: []*rolloutv1.VersionSpan{{Version: version, Length: int32(count)}},
		Sampling:     task.Sampling[n.settings.Policy],
		FinishReason: sample.Finish,
		Engine:       n.settings.Name,
	}
}

func tensor(dtype commonv1.Dtype, length int, values any) *commonv1.Tensor {
	data := &bytes.Buffer{}
	if err := binary.Write(data, binary.LittleEndian, values); err != nil {
		panic(err) // no number: a defect of this file
	}
	return &commonv1.Tensor{Dtype: dtype, Shape: []int64{int64(length)}, Data: data.Bytes()}
}

// deliver sends what is in the outbox; what was not acknowledged comes first on a new stream.
func (n *Node) deliver(ctx context.Context) error {
	open := func(ctx context.Context) (dataflowv1.RaasService_StreamRolloutsClient, error) {
		stream, err := n.run.StreamRollouts(ctx)
		if err == nil {
			n.outbox.rewind()
			go n.send(stream)
		}
		return stream, err
	}
	return member.Read(ctx, n.member, false, open, func(event *dataflowv1.StreamRolloutsResponse) (bool, error) {
		for _, ack := range event.Acks {
			n.outbox.acknowledged(ack.ItemId)
			n.end(ack.ItemId)
		}
		return true, nil
	})
}

func (n *Node) send(stream dataflowv1.RaasService_StreamRolloutsClient) {
	for {
		items := n.outbox.next(stream.Context())
		if items == nil || stream.Send(&dataflowv1.StreamRolloutsRequest{Items: items}) != nil {
			return
		}
	}
}
