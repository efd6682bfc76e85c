-- Run once by PostgreSQL's image, when its volume is empty.
CREATE DATABASE prefect;
CREATE DATABASE mlflow;
