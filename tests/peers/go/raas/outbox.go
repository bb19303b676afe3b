package raas

import (
	"context"
	"sync"

	dataflowv1 "example.com/astraflow/gen/astraflow/dataflow/v1"
)

// outbox keeps what was not acknowledged, in order.
type outbox struct {
	mutex sync.Mutex
	items []*dataflowv1.RolloutItem
	// How many of them are on their way over the present stream.
	sent    int
	changed chan struct{}
}

func newOutbox() *outbox { return &outbox{changed: make(chan struct{})} }

func (o *outbox) put(items ...*dataflowv1.RolloutItem) {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	o.items = append(o.items, items...)
	close(o.changed)
	o.changed = make(chan struct{})
}

// rewind has everything sent again, on a new stream.
func (o *outbox) rewind() {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	o.sent = 0
}

// next waits for what was not sent yet; nil: the stream is over.
func (o *outbox) next(ctx context.Context) []*dataflowv1.RolloutItem {
	for {
		items, changed := o.look()
		if ctx.Err() != nil {
			return nil
		}
		if len(items) > 0 {
			return items
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// One at a time: together they may be larger than a message can be.
func (o *outbox) look() ([]*dataflowv1.RolloutItem, <-chan struct{}) {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	if o.sent == len(o.items) {
		return nil, o.changed
	}
	o.sent++
	return o.items[o.sent-1 : o.sent : o.sent], nil
}

// acknowledged forgets an item.
func (o *outbox) acknowledged(id string) {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	for at, item := range o.items {
		if idOf(item) == id {
			o.items = append(o.items[:at:at], o.items[at+1:]...)
			if at < o.sent {
				o.sent--
			}
			return
		}
	}
}

func idOf(item *dataflowv1.RolloutItem) string {
	if rollout := item.GetRollout(); rollout != nil {
		return rollout.RolloutId
	}
	return item.GetResult().GetTaskId()
}
