module example.com/astraflow

go 1.19
