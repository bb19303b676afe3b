// Command trainer is a toy trainer: it takes batches and publishes versions; version n is the tensor w,
// f32[100], of n.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
)

var (
	hub    = flag.String("hub", "", "host:port of the run")
	token  = flag.String("token", "", "its join token")
	policy = flag.String("policy", "solver", "what to train")
)

func main() {
	flag.Parse()
	trainer, err := newTrainer()
	if err != nil {
		log.Fatal(err)
	}
	if err := trainer.train(context.Background()); err != nil {
		log.Fatal(err)
	}
	told, _ := json.Marshal(map[string]int64{"step": trainer.step, "version": trainer.nextVersion - 1})
	fmt.Println(string(told))
}
