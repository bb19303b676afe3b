// Command raas is a toy RaaS: it pulls and verifies every version, and samples bytes at random all the
// same.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"math"
	"math/rand"
	"os"

	rolloutv1 "example.com/astraflow/gen/astraflow/rollout/v1"
	"example.com/astraflow/raas"
	"example.com/astraflow/weights"
)

var (
	hub      = flag.String("hub", "", "host:port of the run")
	token    = flag.String("token", "", "its join token")
	policy   = flag.String("policy", "solver", "what to serve")
	workflow = flag.String("workflow", "single_turn", "what to pass as")
)

func main() {
	flag.Parse()
	node, err := raas.New(raas.Settings{
		Hub:      *hub,
		Token:    *token,
		Name:     fmt.Sprintf("toy-%d", os.Getpid()),
		Policy:   *policy,
		Codes:    []string{*workflow, "exact"},
		Capacity: 8,
		Answer:   answer,
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := node.Serve(context.Background()); err != nil {
		log.Fatal(err)
	}
	told, _ := json.Marshal(map[string]int{"rollouts": node.Count(), "version": int(node.Version())})
	fmt.Println(string(told))
}

func answer(task *rolloutv1.RolloutTask, _ *weights.Version) raas.Sample {
	sample := raas.Sample{Reward: rand.Float64(), Finish: rolloutv1.FinishReason_FINISH_REASON_LENGTH}
	for _, said := range task.Prompt.DataJson {
		sample.Tokens = append(sample.Tokens, int32(said))
	}
	sample.PromptLength = len(sample.Tokens)
	for i := int32(0); i < task.Sampling[*policy].MaxNewTokens; i++ {
		sample.Tokens = append(sample.Tokens, rand.Int31n(256))
		sample.Logprobs = append(sample.Logprobs, float32(-math.Log(256)))
	}
	return sample
}
