// Package member does what every member of a run does: it joins, keeps its session alive, and makes
// calls again that were cut.
package member

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	commonv1 "example.com/astraflow/gen/astraflow/common/v1"
	dataflowv1 "example.com/astraflow/gen/astraflow/dataflow/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

const (
	patience = 10 * time.Second
	deadline = 5 * time.Second
	// A part of a batch has at most 64 MiB, and gRPC reads 4 MiB unless told otherwise.
	maxMessageNbytes = 80 << 20
)

// Role is what differs between a trainer and a RaaS.
type Role interface {
	// Open registers the member or has it join the pool.
	Open(ctx context.Context, resume *commonv1.SessionResume) (*commonv1.Session, error)
	// Hold says which tasks or batches the process still works on.
	Hold(resume *commonv1.SessionResume)
	// Load says how busy it is.
	Load() *dataflowv1.KeepAliveRequest
}

// Member is one member of a run.
type Member struct {
	Conn *grpc.ClientConn

	// A connection of its own: bulk must not delay a KeepAlive.
	pulse *grpc.ClientConn
	token string
	role  Role

	joining sync.Mutex
	mutex   sync.Mutex
	session *commonv1.Session
}

// Dial connects without TLS, as a hub on loopback wants it.
func Dial(address string) (*grpc.ClientConn, error) {
	size := grpc.MaxCallRecvMsgSize(maxMessageNbytes)
	return grpc.Dial(address, grpc.WithInsecure(), grpc.WithDefaultCallOptions(size))
}

// New makes a member that has not joined; the role may call it from then on.
func New(hub, token string, role Role) (*Member, error) {
	conn, err := Dial(hub)
	if err != nil {
		return nil, err
	}
	pulse, err := Dial(hub)
	if err != nil {
		return nil, err
	}
	return &Member{Conn: conn, pulse: pulse, token: token, role: role}, nil
}

// Join opens the session and keeps it alive until the context ends.
func (m *Member) Join(ctx context.Context) error {
	if err := m.enter(ctx, nil); err != nil {
		return err
	}
	go m.keepAlive(ctx)
	return nil
}

// TransferToken is the secret of every TransferService of the run; it may change.
func (m *Member) TransferToken() string {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	if m.session == nil {
		return ""
	}
	return string(m.session.TransferToken)
}

// Call makes a call; it is repeated while the run cannot be reached, and after joining anew when the
// session ended.
func (m *Member) Call(ctx context.Context, call func(ctx context.Context) error) error {
	for end := time.Now().Add(patience); ; {
		session := m.present()
		limited, cancel := context.WithTimeout(withSession(ctx, session), deadline)
		err := call(limited)
		cancel()
		if err == nil {
			return nil
		}
		if err := m.mend(ctx, err, end, session); err != nil {
			return err
		}
	}
}

// Stream is what a call with a stream of answers returns.
type Stream[Event any] interface{ Recv() (Event, error) }

// Read hands out what a stream sends until its end, or until take wants no more. A stream that is cut
// is opened again. Reconciles: after joining again, by which the run finds out what the cut swallowed.
func Read[Event any, S Stream[Event]](
	ctx context.Context,
	m *Member,
	reconciles bool,
	open func(ctx context.Context) (S, error),
	take func(event Event) (more bool, err error),
) error {
	end := time.Now().Add(patience)
	for {
		session, began := m.present(), time.Now()
		err := readOnce(withSession(ctx, session), open, func(event Event) (bool, error) {
			end = time.Now().Add(patience)
			return take(event)
		})
		if err == nil {
			return nil
		}
		// One that stood for long was no failure to open it.
		if time.Since(began) > patience {
			end = time.Now().Add(patience)
		}
		if err := m.mend(ctx, err, end, session); err != nil {
			return err
		}
		if reconciles {
			if err := m.enter(ctx, session); err != nil && !isCut(err) {
				return err
			}
		}
	}
}

func readOnce[Event any, S Stream[Event]](
	ctx context.Context, open func(context.Context) (S, error), take func(Event) (bool, error),
) error {
	// What is sent on the stream ends with it.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := open(ctx)
	if err != nil {
		return err
	}
	for {
		event, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if more, err := take(event); err != nil || !more {
			return err
		}
	}
}

// Leave ends the session: what the member holds returns to the run.
func (m *Member) Leave(ctx context.Context, message string) error {
	return m.Call(ctx, func(ctx context.Context) error {
		request := &dataflowv1.EndSessionRequest{Message: message}
		_, err := dataflowv1.NewSessionServiceClient(m.Conn).EndSession(ctx, request)
		return err
	})
}

// enter joins unless somebody else did since: joining twice would end what that one opened.
func (m *Member) enter(ctx context.Context, ended *commonv1.Session) error {
	m.joining.Lock()
	defer m.joining.Unlock()
	if m.present() != ended {
		return nil
	}
	var resume *commonv1.SessionResume
	if ended != nil {
		resume = &commonv1.SessionResume{ResumeToken: ended.Token, Incarnation: 1}
		m.role.Hold(resume)
	}
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+m.token)
	session, err := m.role.Open(ctx, resume)
	if err != nil {
		return err
	}
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.session = session
	return nil
}

func (m *Member) keepAlive(ctx context.Context) {
	for ctx.Err() == nil {
		session := m.present()
		limited, cancel := context.WithTimeout(withSession(ctx, session), deadline)
		answer, err := dataflowv1.NewSessionServiceClient(m.pulse).KeepAlive(limited, m.role.Load())
		cancel()
		// Why it failed the next one finds out, or another call.
		if err == nil && len(answer.TransferToken) > 0 {
			m.mutex.Lock()
			session.TransferToken = answer.TransferToken
			m.mutex.Unlock()
		}
		pause(ctx, session.KeepAliveInterval.AsDuration())
	}
}

// mend returns nil when the call that failed can be made again.
func (m *Member) mend(ctx context.Context, err error, end time.Time, session *commonv1.Session) error {
	reason := Reason(err)
	switch {
	case ctx.Err() != nil || time.Now().After(end):
		return err
	case reason == "SESSION_ENDED":
		return m.enter(ctx, session)
	case reason == "NOT_READY" || reason == "" && isCut(err):
		pause(ctx, 50*time.Millisecond)
		return nil
	}
	return err
}

func (m *Member) present() *commonv1.Session {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	return m.session
}

func withSession(ctx context.Context, session *commonv1.Session) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "astraflow-session-bin", string(session.Token))
}

func pause(ctx context.Context, duration time.Duration) {
	select {
	case <-time.After(duration):
	case <-ctx.Done():
	}
}
