// Package raas is a RaaS of one policy around an engine of yours: it follows versions, takes tasks and
// delivers rollouts.
package raas

import (
	"context"
	"sync"

	commonv1 "example.com/astraflow/gen/astraflow/common/v1"
	dataflowv1 "example.com/astraflow/gen/astraflow/dataflow/v1"
	rolloutv1 "example.com/astraflow/gen/astraflow/rollout/v1"
	weightsv1 "example.com/astraflow/gen/astraflow/weights/v1"
	"example.com/astraflow/member"
	"example.com/astraflow/weights"
)

// Settings say who joins what.
type Settings struct {
	Hub, Token string
	// Name is unique in the pool.
	Name, Policy string
	// Codes are the workflows and scorers of the recipe that Answer stands for.
	Codes []string
	// Capacity is how many rollouts run at once.
	Capacity int32
	// Answer is the engine and the scorer: it samples one rollout of a task with the given weights.
	Answer func(task *rolloutv1.RolloutTask, version *weights.Version) Sample
}

// Sample is a prompt and what was sampled after it.
type Sample struct {
	Tokens []int32
	// PromptLength counts the tokens that were not sampled.
	PromptLength int
	// Logprobs of the sampled tokens, under the distribution that they were drawn from.
	Logprobs []float32
	Reward   float64
	Finish   rolloutv1.FinishReason
}

// Node is the RaaS.
type Node struct {
	settings Settings
	member   *member.Member
	run      dataflowv1.RaasServiceClient
	ledger   weightsv1.VersionServiceClient
	replica  *weights.Replica
	outbox   *outbox

	mutex    sync.Mutex
	tasks    map[string]bool
	idle     *sync.Cond
	rollouts int
	// The newest tasks that were given back, and how many there were.
	nacks     []*dataflowv1.TaskNack
	nackCount int
	nacked    chan struct{}
}

// New makes a node that has not joined.
func New(settings Settings) (*Node, error) {
	n := &Node{
		settings: settings,
		replica:  weights.NewReplica(),
		outbox:   newOutbox(),
		tasks:    map[string]bool{},
		nacked:   make(chan struct{}, 1),
	}
	n.idle = sync.NewCond(&n.mutex)
	joined, err := member.New(settings.Hub, settings.Token, n)
	if err != nil {
		return nil, err
	}
	n.member = joined
	n.run = dataflowv1.NewRaasServiceClient(joined.Conn)
	n.ledger = weightsv1.NewVersionServiceClient(joined.Conn)
	return n, nil
}

// Serve works until the run asks the node to leave.
func (n *Node) Serve(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := n.member.Join(ctx); err != nil {
		return err
	}
	failed := make(chan error, 3)
	go func() { failed <- n.followVersions(ctx) }()
	go func() { failed <- n.deliver(ctx) }()
	done := make(chan error, 1)
	go func() { done <- n.takeTasks(ctx) }()
	for {
		select {
		case err := <-failed:
			if err != nil {
				return err
			}
		case err := <-done:
			if err != nil {
				return err
			}
			return n.member.Leave(ctx, "as asked")
		}
	}
}

// Count returns how many rollouts were sampled.
func (n *Node) Count() int {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	return n.rollouts
}

// Version returns what the node serves; -1: nothing.
func (n *Node) Version() int64 {
	if held := n.replica.Version(); held != nil {
		return held.Number
	}
	return -1
}

// Open joins the pool.
func (n *Node) Open(ctx context.Context, resume *commonv1.SessionResume) (*commonv1.Session, error) {
	codes := []*rolloutv1.RegisteredCode{}
	for _, name := range n.settings.Codes {
		codes = append(codes, &rolloutv1.RegisteredCode{Name: name})
	}
	policy := &dataflowv1.ServedPolicy{PolicyId: n.settings.Policy, MaxContextTokenCount: 4096}
	if held := n.replica.Version(); held != nil {
		policy.Version = &held.Number
	}
	answer, err := n.run.JoinPool(ctx, &dataflowv1.JoinPoolRequest{
		Name:     n.settings.Name,
		Contract: &commonv1.Contract{ContractVersion: 1, Software: "astraflow-go"},
		Resume:   resume,
		Capacity: n.settings.Capacity,
		Policies: []*dataflowv1.ServedPolicy{policy},
		Codes:    codes,
	})
	return answer.GetSession(), err
}

// Hold names the tasks that are not closed yet.
func (n *Node) Hold(resume *commonv1.SessionResume) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	for task := range n.tasks {
		resume.HeldTaskIds = append(resume.HeldTaskIds, task)
	}
}

// Load counts the open tasks.
func (n *Node) Load() *dataflowv1.KeepAliveRequest {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	load := &commonv1.RaasLoad{InflightCount: int32(len(n.tasks)), Capacity: n.settings.Capacity}
	return &dataflowv1.KeepAliveRequest{Load: &dataflowv1.KeepAliveRequest_Raas{Raas: load}}
}
