package member

import (
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Reason returns the name of the contract's Reason without REASON_; empty: no answer of the contract.
func Reason(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.Domain == "astraflow" {
			return info.Reason
		}
	}
	return ""
}

// Refuse makes an error of the contract.
func Refuse(code codes.Code, reason, message string) error {
	refusal := status.New(code, message)
	told, err := refusal.WithDetails(&errdetails.ErrorInfo{Domain: "astraflow", Reason: reason})
	if err != nil {
		return refusal.Err()
	}
	return told.Err()
}

// isCut tells whether a call may go well when it is made again.
func isCut(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.Aborted, codes.Canceled, codes.Internal, codes.Unknown, codes.DeadlineExceeded:
		return true
	}
	return false
}
